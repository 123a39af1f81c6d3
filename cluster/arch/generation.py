"""The sampling defaults that a model's authors recommend in generation_config.json."""

from pathlib import Path

from cluster.arch.keys import read_json
from cluster.config import ConfigError

SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""The values that are read, each with its (minimum, maximum). vLLM and SGLang read the same values."""


def sampling_defaults(folder: str) -> dict[str, float]:
    """Return the sampling values for requests that set none. The result is empty if there is no generation_config.json,
    or if it gives no values.

    Raises:
        ConfigError: a value is not a number, or out of bounds.
    """
    if not (Path(folder) / "generation_config.json").is_file():
        return {}
    generation_config = read_json(folder, "generation_config.json")
    defaults: dict[str, float] = {}
    for name, (minimum, maximum) in SAMPLING_BOUNDS.items():
        if (value := generation_config.get(name)) is None:
            continue
        is_in_bounds = isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum
        if is_in_bounds and (name != "top_k" or value == int(value)):
            defaults[name] = int(value) if name == "top_k" else value
        else:
            raise ConfigError(
                f"generation_config.json of {folder!r}: {name} must be a number in [{minimum}, {maximum}], a whole "
                f"number for top_k, got {value!r}; correct it, or set sampling_defaults to openai"
            )
    return defaults
