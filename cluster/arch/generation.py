"""How the makers of a model would have it sampled, as its generation_config.json says."""

from pathlib import Path

from cluster.arch.keys import read_json
from cluster.config import ConfigError

BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}
"""The numbers that are read, and between which they lie; vLLM and SGLang read the same."""


def sampling_defaults(folder: str) -> dict[str, float]:
    """What a request that leaves these out gets; nothing where the folder names none.

    Raises:
        ConfigError: one is no number, or out of bounds.
    """
    if not (Path(folder) / "generation_config.json").is_file():
        return {}
    given = read_json(folder, "generation_config.json")
    found = {name: given[name] for name in BOUNDS if given.get(name) is not None}
    for name, value in found.items():
        least, most = BOUNDS[name]
        whole = name != "top_k" or isinstance(value, int)
        if isinstance(value, bool) or not isinstance(value, int | float) or not whole or not least <= value <= most:
            raise ConfigError(
                f"generation_config.json of {folder!r}: {name} must lie in [{least}, {most}], got {value!r}; mend "
                "it, or set sampling_defaults to openai"
            )
    return found
