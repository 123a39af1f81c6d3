"""The parts of FlashInfer that are used, and which attention FlashInfer computes.

FlashInfer runs on a GPU only. It is imported only if the setting `attention_backend` names it. Its interface changes
between minor versions, so only one version is accepted; `tests/flashinfer/signatures.json` holds the signatures of that
version.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from cluster.arch import LayerGeometry

VERSION = "0.7.2.post1"
MAX_LINES = 4_000_000
"""The most lines of one plan. A line is one query head of one row. A plan's work list has room for 131,072 blocks of 64
lines.
"""
MAX_LATENT_LINES = 900_000
"""The most lines of one plan for latents. The work list of such a plan has room for 16,384 blocks of 64 lines."""


class Share(NamedTuple):
    """The part of a layer's attention that FlashInfer computes. If `trees` is True, it computes the attention of tree
    rows to committed tokens. If `texts` is True, it computes all attention of prompt rows. `reason` says why FlashInfer
    does not compute both; it is empty if FlashInfer does.
    """

    trees: bool
    texts: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """FlashInfer's wrapper classes for keys and values (`paged`) and for latents (`latent`). `make_metadata` creates
    the metadata that a plan of `latent` takes. `variant` is the kernel family, fa2 or fa3. FlashInfer is used only for
    layers whose head size is in `head_sizes`, or whose latent is in `latent_sizes`: pairs (size of the value, size of
    the rotated key).
    """

    paged: Callable[..., Any]
    latent: Callable[..., Any]
    make_metadata: Callable[..., Any]
    variant: str
    head_sizes: frozenset[int] = frozenset({64, 128, 256})
    latent_sizes: frozenset[tuple[int, int]] = frozenset({(512, 64)})

    def share(self, layer: LayerGeometry) -> Share:
        """Return what FlashInfer computes in a layer of this geometry."""
        if layer.latent is not None:
            value_and_rest = layer.value_dim, layer.head_dim - layer.value_dim
            if value_and_rest not in self.latent_sizes or layer.sliding_window is not None:
                kind = " with a sliding window" if layer.sliding_window else ""
                return Share(
                    False,
                    False,
                    f"it is not asked for latents of {value_and_rest[0]} + {value_and_rest[1]} numbers{kind}",
                )
            if layer.heads & (layer.heads - 1) or layer.heads > 128:
                return Share(True, False, "prompts over latents need a power of two of heads, at most 128")
            return Share(True, True)
        if layer.value_dim != layer.head_dim:
            sizes = f"{layer.head_dim} and {layer.value_dim}"
            return Share(False, False, f"it is not asked for keys and values of different sizes ({sizes})")
        if layer.head_dim not in self.head_sizes:
            supported = sorted(self.head_sizes)
            return Share(False, False, f"it is asked for heads of {supported} numbers, and these have {layer.head_dim}")
        if layer.chunked:
            return Share(False, False, "it has no attention within chunks")
        if layer.sliding_window is not None:
            return Share(False, True, "in its sliding windows a row's place counts, in a tree a node's depth")
        return Share(True, True)

    def triton_layers(self, layers: Sequence[LayerGeometry], most_rows: int) -> Iterator[str]:
        """Yield texts that say which attention of a runner's `layers` is left to Triton. A forward of the runner has at
        most `most_rows` rows.
        """
        shares = [self.share(layer) for layer in layers]
        for share in dict.fromkeys(share for share in shares if share.reason):
            forwards = "prompts" if share.trees else "trees" if share.texts else "all"
            yield f"layers {_indices(shares, share)}: {forwards} by Triton: {share.reason}"
        most = [
            (MAX_LINES if layer.latent is None else MAX_LATENT_LINES) // layer.heads
            if share.trees or share.texts
            else most_rows
            for layer, share in zip(layers, shares, strict=True)
        ]
        for rows in sorted({rows for rows in most if rows < most_rows}):
            numbers = "" if len(set(most)) == 1 else f"layers {_indices(most, rows)}: "
            yield f"{numbers}forwards of more than {rows} rows: all by Triton: a plan has no room for more"


def _indices(values: Sequence[Any], value: Any) -> str:
    """Return the indices of `value` in `values` as text."""
    return ", ".join(str(index) for index, other in enumerate(values) if other == value)


def find(device: torch.device, dtype: torch.dtype) -> FlashInfer | str:
    """Return FlashInfer for this device and `dtype`. If it is not available, return a text that says why, and what to
    do.
    """
    if device.type != "cuda":
        return f"runs on a GPU and device is {device.type}; set attention_backend to auto"
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        return f"computes in bfloat16 and float16, and dtype is {name}; set one of them, or attention_backend to triton"
    remedy = f"pip install flashinfer-python=={VERSION}, or set attention_backend to triton"
    if importlib.util.find_spec("flashinfer") is None:
        return f"is not installed; {remedy}"
    if (installed := version("flashinfer-python")) != VERSION:
        return f"is written for flashinfer-python {VERSION}, and {installed} is installed; {remedy}"
    flashinfer, mla = importlib.import_module("flashinfer"), importlib.import_module("flashinfer.mla")
    variant = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
    paged_wrapper, latent_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper, mla.BatchMLAPagedAttentionWrapper
    return FlashInfer(paged_wrapper, latent_wrapper, mla.MLAPlanMetadata.csr, variant)
