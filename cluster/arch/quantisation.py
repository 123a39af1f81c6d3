"""What a checkpoint's config says of its quantised weights; which tensors are quantised, and how, the tensors tell."""

from dataclasses import dataclass
from pathlib import Path

from cluster.arch.keys import Keys, Shapes, read_json
from cluster.config import ConfigError

METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round", "fbgemm_fp8")
# Of compressed-tensors; "mixed-precision" has several of the others.
FORMATS = ("dense", "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision")
MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8")
AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round:auto_awq": 0}  # AutoRound's packings, and what their zeros lack
# Where a rotation is part of the weights, and nothing is left to do.
IN_WEIGHTS = (None, "weight_input", "weight_output")


@dataclass(frozen=True, slots=True)
class Quantisation:
    """`bits` are those of codes that share an int32. Of AWQ and GPTQ `group` is how many inputs share a scale, None
    where all do, or it is not said. `zero_offset` is what GPTQ's stored zeros lack; `by_activation`: its groups are of
    inputs in an order of their own. `activations`: the config wants them quantised too.
    """

    bits: int = 4
    group: int | None = None
    zero_offset: int = 1
    by_activation: bool = False
    activations: bool = False


def read_quantisation(folder: str) -> Quantisation:
    """What the config.json of `folder` says; a folder without one says nothing.

    Raises:
        ConfigError: a method or format that is not served.
    """
    if not (Path(folder) / "config.json").is_file():
        return Quantisation()
    return quantisation_of(Keys(read_json(folder, "config.json"), folder))


def quantisation_of(config: Keys) -> Quantisation:
    """What a config says.

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
    if method == "awq":
        _known(own, "version", (None, "gemm", "GEMM"))
        _known(own, "bits", (None, 4))
        return Quantisation(4, _group(own))
    if method == "gptq":
        _known(own, "bits", (None, 4, 8))
        _known(own, "checkpoint_format", (None, "gptq", "gptq_v2"))
        offset = 0 if own.data.get("checkpoint_format") == "gptq_v2" else 1
        group = None if own.section("dynamic").data else _group(own)  # its rules may have others for some layers
        return Quantisation(own.integer("bits", 4), group, offset, own.flag("desc_act"))
    if method == "auto-round":
        _known(own, "packing_format", tuple(AUTO_ROUND))
        _known(own, "data_type", (None, "int"))
        return Quantisation(own.integer("bits", 4), zero_offset=AUTO_ROUND[own.data["packing_format"]])
    return Quantisation(activations=method == "fbgemm_fp8")


def _compressed(own: Keys) -> Quantisation:
    """What compressed-tensors says."""
    _known(own, "format", (None, *FORMATS))
    _known(own.section("sparsity_config"), "format", (None, "dense"))
    groups = _sections(own.section("config_groups"))
    for group in groups:
        _known(group.section("weights"), "num_bits", (None, 4, 8))
    for rotation in _sections(own.section("transform_config").section("config_groups")):
        for at in rotation.data.get("apply") or ():
            _known(Keys(at, own.where), "location", IN_WEIGHTS)
    bits = {group.section("weights").integer("num_bits", 4) for group in groups}
    asks = any(group.data.get("input_activations") for group in groups)
    return Quantisation(8 if bits == {8} else 4, activations=asks)


def _sections(keys: Keys) -> list[Keys]:
    return [keys.section(name) for name in keys.data]


def with_whole(shapes: dict[str, tuple[int, ...]], bits: int) -> Shapes:
    """`shapes`, and those of the matrices that lie in int32, under the names that they would have unquantised."""
    whole = dict(shapes)
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight_packed")
        if stem != name and len(shape) == 2:
            whole[f"{stem}.weight"] = shape[0], shape[1] * 32 // bits
        stem = name.removesuffix(".qweight")
        scales = shapes.get(f"{stem}.scales", ())
        if stem != name and len(shape) == len(scales) == 2:
            inputs = shape[0] * 32 // bits if shape[1] == scales[1] else shape[0]  # GPTQ; AWQ
            whole[f"{stem}.weight"] = scales[1], inputs
    return whole


def _group(keys: Keys) -> int | None:
    return None if keys.data.get("group_size") == -1 else keys.integer("group_size", 0) or None


def _known(keys: Keys, key: str, known: tuple[object, ...]) -> None:
    if (value := keys.data.get(key)) not in known:
        names = ", ".join(str(each) for each in known if each is not None)
        raise ConfigError(f"{keys.file} of {keys.where!r}: {key} {value!r} is not served; known: {names}")
