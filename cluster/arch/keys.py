"""Typed access to a checkpoint's `config.json`, with errors that name the file and the key."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Return the JSON object in one file of a checkpoint folder.

    Raises:
        ConfigError: the folder or file is missing or unreadable, or does not hold a JSON object.
    """
    path = Path(folder) / name
    check_folder(folder)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{name} is missing in {folder!r}; {_folder_hint(Path(folder))}") from None
    except OSError as error:
        raise ConfigError(f"{name} in {folder!r} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{name} in {folder!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name} in {folder!r} must hold a JSON object")
    return data


def check_folder(folder: str) -> None:
    """Raise unless `folder` is an existing folder.

    Raises:
        ConfigError: `folder` is a file or does not exist; the message says what to give instead.
    """
    if Path(folder).is_file():
        raise ConfigError(f"model folder {folder!r} is a file; give the folder that holds config.json and safetensors")
    if not Path(folder).is_dir():
        raise ConfigError(
            f"model folder {folder!r} does not exist; give a folder with config.json, or the name that a model has "
            "on a hub: ORGANISATION/NAME, or ORGANISATION/NAME@REVISION"
        )


def _folder_hint(folder: Path) -> str:
    """Return the end of an error message: which folder or file to give instead of a folder without a config."""
    snapshots = sorted(str(path) for path in folder.glob("snapshots/*") if path.is_dir())
    if snapshots:
        return f"this is a cache of the Hugging Face hub: give the folder of a revision in it, as {snapshots[-1]!r}"
    if (folder / "adapter_config.json").is_file():
        return "this is an adapter (LoRA): merge it into its base model and give the folder of that"
    if any(folder.glob("*.gguf")):
        return "GGUF files are not read: give the folder of the model's safetensors"
    return "give the folder of a checkpoint"


class ConfigKeys:
    """Typed access to a config's keys. A null value counts as missing; every error names the file and the key."""

    def __init__(self, data: Mapping[str, Any], folder: str, file: str = "config.json") -> None:
        self.data, self.folder, self.file = data, folder, file

    def error(self, message: str) -> ConfigError:
        """Return an error about a value of this config; it names the file and the folder."""
        return ConfigError(f"{self.file} of {self.folder!r}: {message}")

    def with_data(self, data: Mapping[str, Any]) -> "ConfigKeys":
        """Return a `ConfigKeys` with the values `data`. Its errors name the same file and folder."""
        return ConfigKeys(data, self.folder, self.file)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigKeys":
        """Return the same keys, with `defaults` for missing keys."""
        present = {key: value for key, value in self.data.items() if value is not None}
        return self.with_data({**defaults, **present})

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, a positive integer, or `default` if the key is missing."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{key} must be a positive integer, got {value!r}")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Return the value of `key`, an integer from 0, or `default` if the key is missing."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{key} must be an integer from 0, got {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """Return the value of `key`, a positive number, or `default` if the key is missing."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the value of `key`, true or false, or `default` if the key is missing."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def section(self, key: str) -> "ConfigKeys":
        """Return the object under `key` as `ConfigKeys`, which are empty if the key is missing."""
        value = self.data.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.error(f"{key} must be an object, got {value!r}")
        return self.with_data(value)

    def integers(self, key: str) -> list[int] | None:
        """Return the value of `key`, a list of integers, or None if the key is missing."""
        value = self.data.get(key)
        if value is None or (isinstance(value, list) and all(type(i) is int for i in value)):
            return value
        raise self.error(f"{key} must be a list of integers, got {value!r}")


def family_of(keys: ConfigKeys, served: Sequence[str], role: str) -> str:
    """Return the first entry of `architectures` that is in `served`. `role` names the model's role in the error.

    Raises:
        ConfigError: no entry is in `served`.
    """
    names = keys.data.get("architectures") or []
    for name in names:
        if name in served:
            return str(name)
    raise keys.error(f"architectures {names} names no {role} served here; known: {', '.join(served)}")


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the name of the dtype in which the weights are stored; bfloat16 if the config does not say."""
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return str(name).removeprefix("torch.")
