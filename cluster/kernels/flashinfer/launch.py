"""The launch arguments of FlashInfer's wrappers: all attributes that `run` reads, so that two plans can be compared.

A plan is what a wrapper's method `plan` leaves in these attributes. A CUDA graph holds the numbers and addresses of the
plan that it was captured with; at replay it reads the memory at these addresses. So a graph can be replayed with a new
plan if all attributes that `run` reads are equal. The lists below come from the source of one version of FlashInfer; a
test compares them with "read" in `tests/flashinfer/signatures.json`.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

PAGED = (
    *("_backend", "_batch_size", "_block_tables", "_cached_kv_data_type", "_cached_module"),
    *("_cached_o_data_type", "_cached_q_data_type", "_causal", "_cudnn_plan", "_cudnn_prepared"),
    *("_custom_mask_buf", "_cute_dsl_wrapper", "_eagle_verify_fp8kv_sm90_state", "_float_workspace_buffer"),
    *("_int_workspace_buffer", "_jit_additional_scalar_names", "_jit_additional_tensor_names", "_jit_module"),
    *("_kv_layout", "_kv_lens_buffer", "_logits_soft_cap", "_mask_indptr_buf", "_max_item_len_ptr"),
    *("_max_kv_len", "_max_q_len", "_num_kv_heads", "_num_qo_heads", "_paged_kv_indices_buf"),
    *("_paged_kv_indptr_buf", "_paged_kv_last_page_len_buf", "_plan_info", "_prefix_len_ptr"),
    *("_prims_backend", "_qo_indptr_buf", "_qo_indptr_last", "_rope_scale", "_rope_theta", "_seq_lens_kv"),
    *("_seq_lens_q", "_sm_scale", "_token_pos_in_items_len", "_token_pos_in_items_ptr"),
    *("_trtllm_gen_multi_ctas_kv_counter_buffer", "_variant_owns_mask", "_window_left", "_workspace_size"),
)
"""Attributes of the wrapper for keys and values."""
LATENT = (
    *("_backend", "_float_workspace_buffer", "_input_contract", "_kv_data_type", "_legacy_flat_csr_plan"),
    *("_planned_kv_cache_layout", "_planned_query_layout", "_q_data_type"),
)
"""Attributes of the wrapper for latents, without `_planned_backend`, which is a new object in each plan."""
LATENT_BACKEND = (
    *("_cached_module", "_causal", "_float_workspace_buffer", "_head_dim_ckv", "_int_workspace_buffer"),
    *("_kv_data_type", "_kv_indices_buf", "_page_size", "_plan_info", "_q_data_type", "_sm_scale"),
    *("_use_profiler", "device"),
)
"""Attributes of the object `_planned_backend`, for kernels of the families fa2 and fa3."""


class KernelMemory(NamedTuple):
    """A tensor that a kernel is launched with: where it is and its layout, not its contents."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any


def paged_launch(wrapper: Any) -> dict[str, Any]:
    """Return the current values of all attributes of `wrapper` (for keys and values) that `run` reads, by name."""
    return {name: _comparable(getattr(wrapper, name)) for name in PAGED}


def latent_launch(wrapper: Any) -> dict[str, Any]:
    """Return the current values of all attributes of `wrapper` (for latents) and of its `_planned_backend` that `run`
    reads, by name.
    """
    backend = wrapper._planned_backend
    wrapper_attributes = {name: _comparable(getattr(wrapper, name)) for name in LATENT}
    return (
        wrapper_attributes
        | {f"planned.{name}": _comparable(getattr(backend, name)) for name in LATENT_BACKEND}
        | {"kind": type(backend)}
    )


def _comparable(value: Any) -> Any:
    """Return `value` in a form to compare: two forms are equal only if launches with the two values are the same."""
    if isinstance(value, Tensor):
        return KernelMemory(value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value)
    return value
