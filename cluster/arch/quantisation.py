"""What a checkpoint's config says about quantised weights. Which tensors are quantised follows from the tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.arch.keys import ConfigKeys, Shapes, read_json
from cluster.arch.quantisation_rules import Scheme, SchemeRule, auto_round_rules, compressed_rules, gptq_rules

METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round", "fbgemm_fp8")
# Formats of compressed-tensors; "mixed-precision" combines several of the others.
FORMATS = ("dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
# ModelOpt's algorithms, and how many outputs and inputs of a matrix share a scale (see `Scheme.block`).
MODELOPT = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0), "FP8_PB_WO": (128, 128), "MXFP8": (1, 32)}
# AutoRound's packings, and the offset of their stored zero points
AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round:auto_awq": 0}
# Places where a rotation is already merged into the weights, so nothing has to be done at run time.
IN_WEIGHTS = (None, "weight_input", "weight_output")
Packing = Literal["gptq", "awq"]
NOTHING = Scheme()


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantisation of a checkpoint by its config: `rules` for single modules, `scheme` for all other modules.

    `packing` is how an int32 of a tensor `qweight` holds codes, or None if the config does not say. `zero_offset` must
    be added to GPTQ's stored zero points. `by_activation`: the inputs of a group need not be neighbours (GPTQ's
    `desc_act`); the tensor `g_idx` lists the group of each input. `activations`: the config also asks for quantised
    activations.
    """

    scheme: Scheme = NOTHING
    rules: tuple[SchemeRule, ...] = ()
    packing: Packing | None = None
    zero_offset: int = 1
    by_activation: bool = False
    activations: bool = False

    def of(self, *names: str) -> Scheme:
        """Return the scheme of a module known by any of `names`: from the first rule that fits, otherwise `scheme`."""
        return next((rule.scheme for rule in self.rules if any(map(rule.fits, names))), self.scheme)


def read_quantisation(folder: str) -> Quantisation:
    """Return the quantisation in the config.json of `folder`. Return `Quantisation()` if there is no such file.

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
    places = [config.section("quantization_config"), config.section("compression_config")]
    places.append(config.section("text_config").section("quantization_config"))
    own = next((place for place in places if place.data), places[0])
    method = own.data.get("quant_method")
    _known(own, "quant_method", (None, *METHODS))
    if method == "compressed-tensors":
        return _compressed(own)
    if method == "modelopt":
        _known(own, "quant_algo", (None, *MODELOPT))
        algorithm = own.data.get("quant_algo")
        said = f"quant_algo is {algorithm}"
        return Quantisation(NOTHING if algorithm is None else Scheme(block=MODELOPT[algorithm], said=said))
    if method == "awq":
        _known(own, "version", (None, "gemm", "GEMM"))
        _known(own, "bits", (None, 4))
        return Quantisation(_groups(own), packing="awq")
    if method == "gptq":
        return _gptq(own)
    if method == "auto-round":
        _known(own, "packing_format", tuple(AUTO_ROUND))
        _known(own, "data_type", (None, "int"))
        packing = own.data["packing_format"]
        common = _groups(own)
        rules = auto_round_rules(own.section("extra_config"), common)
        return Quantisation(common, rules, "awq" if "awq" in packing else "gptq", AUTO_ROUND[packing])
    if method == "fbgemm_fp8":
        return Quantisation(Scheme(block=(1, 0), said="quant_method is fbgemm_fp8"), activations=True)
    return Quantisation(_blocks(own))


def _gptq(own: ConfigKeys) -> Quantisation:
    _known(own, "bits", (None, 4, 8))
    _known(own, "checkpoint_format", (None, "gptq", "gptq_v2"))
    offset = 0 if own.data.get("checkpoint_format") == "gptq_v2" else 1
    common = _groups(own)
    return Quantisation(common, gptq_rules(own.section("dynamic"), common), "gptq", offset, own.flag("desc_act"))


def _compressed(own: ConfigKeys) -> Quantisation:
    """Return the quantisation of a compressed-tensors config."""
    _known(own, "format", (None, *FORMATS))
    _known(own.section("sparsity_config"), "format", (None, "dense"))
    groups = own.section("config_groups")
    each = _sections(groups)
    for group in each:
        _known(group.section("weights"), "num_bits", (None, 4, 8))
    for rotation in _sections(own.section("transform_config").section("config_groups")):
        for at in rotation.data.get("apply") or ():
            _known(ConfigKeys(at, own.where), "location", IN_WEIGHTS)
    rest, rules = compressed_rules(groups)
    return Quantisation(rest, rules, activations=any(group.data.get("input_activations") for group in each))


def _blocks(own: ConfigKeys) -> Scheme:
    """Return the scheme of DeepSeek's FP8: its `weight_block_size` is [outputs, inputs]."""
    size = own.numbers("weight_block_size")
    if size is None:
        return NOTHING
    if len(size) != 2 or min(size) < 1:
        raise own.error(f"weight_block_size must be two positive integers, outputs and inputs, got {size}")
    return Scheme(block=(size[0], size[1]), said=f"weight_block_size is {size}")


def _groups(own: ConfigKeys) -> Scheme:
    """Return the scheme that `bits` and `group_size` give in AWQ, GPTQ and AutoRound. A `group_size` of -1 puts all
    inputs into one group.
    """
    bits = None if own.data.get("bits") is None else own.integer("bits")
    if own.data.get("group_size") == -1:
        return Scheme(bits, (1, 0), "group_size is -1")
    if own.data.get("group_size") is None:
        return Scheme(bits)
    size = own.integer("group_size")
    return Scheme(bits, (1, size), f"group_size is {size}")


def _sections(keys: ConfigKeys) -> list[ConfigKeys]:
    return [keys.section(name) for name in keys.data]


def with_whole(shapes: dict[str, tuple[int, ...]], quantisation: Quantisation) -> Shapes:
    """Return `shapes`, and for each matrix packed in int32 also its unpacked shape, under its unquantised name."""
    whole = dict(shapes)
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight_packed").removesuffix(".qweight")
        if stem == name or len(shape) != 2:
            continue
        lot = 32 // (quantisation.of(f"model.{stem}", stem).bits or 4)
        scales = shapes.get(f"{stem}.scales", ())
        if name.endswith(".weight_packed"):
            whole[f"{stem}.weight"] = shape[0], shape[1] * lot
        elif len(scales) == 2:
            # GPTQ packs along the inputs, AWQ along the outputs
            inputs = shape[0] * lot if shape[1] == scales[1] else shape[0]
            whole[f"{stem}.weight"] = scales[1], inputs
    return whole


def _known(keys: ConfigKeys, key: str, known: tuple[object, ...]) -> None:
    if (value := keys.data.get(key)) not in known:
        names = ", ".join(str(each) for each in known if each is not None)
        raise keys.error(f"{key} {value!r} is not served; known: {names}")
