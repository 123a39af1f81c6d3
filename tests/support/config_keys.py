"""The keys of a config that no file holds."""

from typing import Any

from cluster.arch.keys import ConfigKeys


def config_keys(**data: Any) -> ConfigKeys:
    return ConfigKeys(data, "folder")
