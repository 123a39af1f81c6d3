"""The compute capability that a GPU needs for a KV cache in FP8."""

import pytest

from cluster.config import ConfigError
from cluster.engine.models import _refuse_gpus_without_fp8


def test_fp8_kv_cache_is_refused_only_on_gpus_without_fp8() -> None:
    for capability in ((8, 6), (7, 5)):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8_e4m3 .* has .*; set kv_cache_dtype to auto, or"):
            _refuse_gpus_without_fp8(capability)
    for capability in ((8, 9), (10, 0)):
        _refuse_gpus_without_fp8(capability)
