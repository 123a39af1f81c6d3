"""What a GPU has to be for a cache in FP8."""

import pytest

from cluster.config import ConfigError
from cluster.engine.models import _refuse_gpus_without_fp8


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_a_gpu_that_does_not_know_fp8_is_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8_e4m3 .* has .*; set kv_cache_dtype to auto, or"):
        _refuse_gpus_without_fp8(capability)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
def test_one_that_does_is_not(capability: tuple[int, int]) -> None:
    _refuse_gpus_without_fp8(capability)
