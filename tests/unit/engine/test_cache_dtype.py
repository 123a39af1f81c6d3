"""What a GPU and an engine need for a KV cache in FP8 with attention in Triton."""

import pytest
import torch

from cluster.config import ConfigError
from cluster.engine.models import _refuse_fp8


def test_fp8_kv_cache_is_refused_only_on_gpus_without_fp8() -> None:
    for capability in ((8, 6), (7, 5)):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8_e4m3 .* has .*; set kv_cache_dtype to auto, or"):
            _refuse_fp8(capability, torch.bfloat16)
    for capability in ((8, 9), (10, 0)):
        _refuse_fp8(capability, torch.bfloat16)
        _refuse_fp8(capability, torch.float32)


def test_fp8_kv_cache_is_refused_with_float64() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8_e4m3 .* float64 .*; set dtype to bfloat16, or"):
        _refuse_fp8((9, 0), torch.float64)
