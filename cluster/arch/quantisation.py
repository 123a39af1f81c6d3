"""What a checkpoint's config says about quantised weights. Which tensors are quantised is not decided here: the loader
sees it from their names, dtypes and shapes (`models/formats.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.arch.keys import ConfigKeys, Shapes, read_json
from cluster.arch.quantisation_rules import Scheme, SchemeRule, auto_round_rules, compressed_rules, gptq_rules

SERVED_METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round", "fbgemm_fp8")
# Formats of compressed-tensors; "mixed-precision" combines several of the others.
COMPRESSED_FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mixed-precision",
)
# ModelOpt's algorithms, and how many outputs and inputs of a matrix share a scale (see `Scheme.block`).
MODELOPT_BLOCKS = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "FP8_PB_WO": (128, 128), "MXFP8": (1, 32)}
# AutoRound's packings, and what must be added to their stored zero points.
AUTO_ROUND_ZERO_OFFSETS = {"auto_round:auto_gptq": 1, "auto_round:auto_awq": 0}
# Locations of rotations that are already merged into the weights, so nothing has to be done at run time.
MERGED_ROTATIONS = (None, "weight_input", "weight_output")
Packing = Literal["gptq", "awq"]
UNSPECIFIED_SCHEME = Scheme()


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a checkpoint by its config: `rules` for single modules, `scheme` for all other modules.

    `packing` is how an int32 of a tensor `qweight` holds codes, or None if the config does not say. `zero_offset` must
    be added to the stored zero points of the packing "gptq". `desc_act`: the inputs of a group need not be neighbours
    (GPTQ's `desc_act`); the tensor `g_idx` lists the group of each input. `quantised_activations`: the config also asks
    for quantised activations.
    """

    scheme: Scheme = UNSPECIFIED_SCHEME
    rules: tuple[SchemeRule, ...] = ()
    packing: Packing | None = None
    zero_offset: int = 1
    desc_act: bool = False
    quantised_activations: bool = False

    def scheme_of(self, *names: str) -> Scheme:
        """Return the scheme of a module known by any of `names`: from the first rule that matches, else `scheme`."""
        return next((rule.scheme for rule in self.rules if any(map(rule.matches, names))), self.scheme)


def read_quantisation(folder: str) -> Quantisation:
    """Return the quantisation in the config.json of `folder`. Return `Quantisation()`, which says nothing, if there is
    no such file.

    Raises:
        ConfigError: a method or format is not served, or a field has the wrong type.
    """
    if not (Path(folder) / "config.json").is_file():
        return Quantisation()
    return quantisation_of(ConfigKeys(read_json(folder, "config.json"), folder))


def quantisation_of(config: ConfigKeys) -> Quantisation:
    """Return the quantisation that a config describes.

    Raises:
        ConfigError: as `read_quantisation`.
    """
    sections = [config.section("quantization_config"), config.section("compression_config")]
    sections.append(config.section("text_config").section("quantization_config"))
    section = next((candidate for candidate in sections if candidate.data), sections[0])
    method = section.data.get("quant_method")
    _check_served(section, "quant_method", (None, *SERVED_METHODS))
    if method == "compressed-tensors":
        return _read_compressed_tensors(section)
    if method == "modelopt":
        _check_served(section, "quant_algo", (None, *MODELOPT_BLOCKS))
        algorithm = section.data.get("quant_algo")
        config_quote = f"quant_algo is {algorithm}"
        return Quantisation(
            UNSPECIFIED_SCHEME
            if algorithm is None
            else Scheme(block=MODELOPT_BLOCKS[algorithm], config_quote=config_quote)
        )
    if method == "awq":
        _check_served(section, "version", (None, "gemm", "GEMM"))
        _check_served(section, "bits", (None, 4))
        return Quantisation(_group_scheme(section), packing="awq")
    if method == "gptq":
        return _read_gptq(section)
    if method == "auto-round":
        _check_served(section, "packing_format", tuple(AUTO_ROUND_ZERO_OFFSETS))
        _check_served(section, "data_type", (None, "int"))
        packing = section.data["packing_format"]
        default_scheme = _group_scheme(section)
        rules = auto_round_rules(section.section("extra_config"), default_scheme)
        return Quantisation(
            default_scheme, rules, "awq" if "awq" in packing else "gptq", AUTO_ROUND_ZERO_OFFSETS[packing]
        )
    if method == "fbgemm_fp8":
        return Quantisation(Scheme(block=(1, 0), config_quote="quant_method is fbgemm_fp8"), quantised_activations=True)
    return Quantisation(_fp8_scheme(section))


def _read_gptq(section: ConfigKeys) -> Quantisation:
    _check_served(section, "bits", (None, 4, 8))
    _check_served(section, "checkpoint_format", (None, "gptq", "gptq_v2"))
    offset = 0 if section.data.get("checkpoint_format") == "gptq_v2" else 1
    default_scheme = _group_scheme(section)
    return Quantisation(
        default_scheme, gptq_rules(section.section("dynamic"), default_scheme), "gptq", offset, section.flag("desc_act")
    )


def _read_compressed_tensors(section: ConfigKeys) -> Quantisation:
    """Return the quantisation of a compressed-tensors config."""
    _check_served(section, "format", (None, *COMPRESSED_FORMATS))
    _check_served(section.section("sparsity_config"), "format", (None, "dense"))
    groups = section.section("config_groups")
    group_sections = _subsections(groups)
    for group in group_sections:
        _check_served(group.section("weights"), "num_bits", (None, 4, 8))
    for rotation in _subsections(section.section("transform_config").section("config_groups")):
        for place in rotation.data.get("apply") or ():
            _check_served(ConfigKeys(place, section.folder), "location", MERGED_ROTATIONS)
    default_scheme, rules = compressed_rules(groups)
    return Quantisation(
        default_scheme,
        rules,
        quantised_activations=any(group.data.get("input_activations") for group in group_sections),
    )


def _fp8_scheme(section: ConfigKeys) -> Scheme:
    """Return the scheme of DeepSeek's FP8: `weight_block_size` is [outputs, inputs]. Without this key, return
    `UNSPECIFIED_SCHEME`.
    """
    block = section.integers("weight_block_size")
    if block is None:
        return UNSPECIFIED_SCHEME
    if len(block) != 2 or min(block) < 1:
        raise section.error(f"weight_block_size must be two positive integers, outputs and inputs, got {block}")
    return Scheme(block=(block[0], block[1]), config_quote=f"weight_block_size is {block}")


def _group_scheme(section: ConfigKeys) -> Scheme:
    """Return the scheme that `bits` and `group_size` give in AWQ, GPTQ and AutoRound. A `group_size` of -1 puts all
    inputs into one group.
    """
    bits = None if section.data.get("bits") is None else section.integer("bits")
    if section.data.get("group_size") == -1:
        return Scheme(bits, (1, 0), "group_size is -1")
    if section.data.get("group_size") is None:
        return Scheme(bits)
    size = section.integer("group_size")
    return Scheme(bits, (1, size), f"group_size is {size}")


def _subsections(keys: ConfigKeys) -> list[ConfigKeys]:
    return [keys.section(name) for name in keys.data]


def with_unpacked_shapes(shapes: dict[str, tuple[int, ...]], quantisation: Quantisation) -> Shapes:
    """Return `shapes`, and for each matrix packed in int32 also its unpacked shape, under its unquantised name."""
    unpacked = dict(shapes)
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight_packed").removesuffix(".qweight")
        if stem == name or len(shape) != 2:
            continue
        codes_per_int32 = 32 // (quantisation.scheme_of(f"model.{stem}", stem).bits or 4)
        scales = shapes.get(f"{stem}.scales", ())
        if name.endswith(".weight_packed"):
            unpacked[f"{stem}.weight"] = shape[0], shape[1] * codes_per_int32
        elif len(scales) == 2:
            # GPTQ packs along the inputs, AWQ along the outputs
            inputs = shape[0] * codes_per_int32 if shape[1] == scales[1] else shape[0]
            unpacked[f"{stem}.weight"] = scales[1], inputs
    return unpacked


def _check_served(keys: ConfigKeys, key: str, served: tuple[object, ...]) -> None:
    if (value := keys.data.get(key)) not in served:
        names = ", ".join(str(value_served) for value_served in served if value_served is not None)
        raise keys.error(f"{key} {value!r} is not served; known: {names}")
