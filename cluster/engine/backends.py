"""Which implementation serves each kind of kernel: one table, by backend, and the functions that read it.

`select_kernels` decides the backend of a rank from the setting `attention_backend` and what this machine has.
Everything else follows from the name of the selected kernels: the KV pool, attention, the sampler, how draft trees grow
and what is learned about them, which of their nodes are verified, how their paths are accepted, lookup of tokens in
earlier text, and token bitmasks. The implementations in torch are the reference: all others must compute the same.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cluster.arch import LayerGeometry
from cluster.arch.windows import pool_layers
from cluster.attention.gather import Gather
from cluster.attention.shape import AttentionShape
from cluster.config import ConfigError
from cluster.kernels.flashinfer import library as flashinfer_library
from cluster.kernels.interface import Kernels
from cluster.kernels.library import KIND_NAMES, library
from cluster.kv.layer_pools import LayerPools
from cluster.kv.page_table import PageTable
from cluster.kv.pool import KVPool
from cluster.kv.window_map import WindowMap
from cluster.models.layered_attention import LayeredAttention
from cluster.models.runner import AttentionBackend
from cluster.sampling.token_bitmask import ApplyTokenBitmask
from cluster.sampling.torch_sampler import Sampler
from cluster.spec.backend import TreeBackend
from cluster.spec.chances import NodeChances
from cluster.spec.lookup import AddLookedUp, LookupChances
from cluster.spec.token_history import Lookup

IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "kernels": {
        "torch": "cluster.kernels.torch_kernels:TorchKernels",
        "c": "cluster.kernels.c_kernels:CKernels",
        "triton": "cluster.kernels.triton_kernels:TritonKernels",
        "flashinfer": "cluster.kernels.flashinfer.kernels:FlashInferKernels",
    },
    "pool": {
        "torch": "cluster.kv.pool:KVPool",
        "c": "cluster.kv.c_pool:CPool",
        "triton": "cluster.kv.triton_pool:TritonPool",
        "flashinfer": "cluster.kv.triton_pool:TritonPool",
    },
    "attention": {
        "torch": "cluster.attention.torch_backend:TorchAttention",
        "c": "cluster.attention.c_backend:CAttention",
        "triton": "cluster.attention.triton_backend:TritonAttention",
        "flashinfer": "cluster.attention.flashinfer.backend:FlashInferAttention",
    },
    "sampler": {
        "torch": "cluster.sampling.torch_sampler:TorchSampler",
        "c": "cluster.sampling.c_sampler:CSampler",
        "triton": "cluster.sampling.triton_sampler:TritonSampler",
        "flashinfer": "cluster.sampling.triton_sampler:TritonSampler",
    },
    "growth": {
        "torch": "cluster.spec.tree:TorchGrowth",
        "c": "cluster.spec.c_tree:growth_of",
        "triton": "cluster.spec.triton_tree:TritonGrowth",
        "flashinfer": "cluster.spec.triton_tree:TritonGrowth",
    },
    "select": {
        "torch": "cluster.spec.row_budget:select_nodes",
        "c": "cluster.spec.c_row_budget:CSelectNodes",
        "triton": "cluster.spec.row_budget:select_nodes",
        "flashinfer": "cluster.spec.row_budget:select_nodes",
    },
    "chances": {
        "torch": "cluster.spec.chances:NodeChances",
        "c": "cluster.spec.c_chances:CNodeChances",
        "triton": "cluster.spec.chances:NodeChances",
        "flashinfer": "cluster.spec.chances:NodeChances",
    },
    "accept": {
        "torch": "cluster.spec.verify:accept",
        "c": "cluster.spec.c_verify:CAccept",
        "triton": "cluster.spec.triton_tree:accept",
        "flashinfer": "cluster.spec.triton_tree:accept",
    },
    "lookup": {
        "torch": "cluster.spec.token_history:TorchLookup",
        "c": "cluster.spec.token_history:CLookup",
        "triton": "cluster.spec.token_history:TorchLookup",
        "flashinfer": "cluster.spec.token_history:TorchLookup",
    },
    "lookup_chances": {
        "torch": "cluster.spec.lookup:LookupChances",
        "c": "cluster.spec.c_lookup:CLookupChances",
        "triton": "cluster.spec.lookup:LookupChances",
        "flashinfer": "cluster.spec.lookup:LookupChances",
    },
    "add_looked_up": {
        "torch": "cluster.spec.lookup:add_looked_up",
        "c": "cluster.spec.c_lookup:CAddLookedUp",
        "triton": "cluster.spec.lookup:add_looked_up",
        "flashinfer": "cluster.spec.lookup:add_looked_up",
    },
    "bitmask": {
        "torch": "cluster.sampling.token_bitmask:apply_token_bitmask",
        "c": "cluster.sampling.token_bitmask:CTokenBitmask",
        "triton": "cluster.sampling.token_bitmask:apply_token_bitmask",
        "flashinfer": "cluster.sampling.token_bitmask:apply_token_bitmask",
    },
}
"""`module:name` by kind and backend. A module is imported only when it is needed: Triton takes a second to load."""


def implementation(kind: str, backend: str) -> Any:
    """Return the class or function that serves `kind` for `backend`; see `IMPLEMENTATIONS`."""
    module, _, name = IMPLEMENTATIONS[kind][backend].partition(":")
    return getattr(importlib.import_module(module), name)


def select_kernels(setting: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the kernels for a value of the setting `attention_backend`.

    `auto` selects C on a CPU and Triton on a GPU. Where these are not available, it selects torch, and `description` of
    the torch kernels says why. FlashInfer is selected only if the setting names it, because its speed has not been
    measured yet.

    Raises:
        ConfigError: the setting names a backend that is not available here.
    """
    if setting == "torch":
        return _create_kernels("torch")
    backend = setting if setting != "auto" else "triton" if device.type == "cuda" else "c"
    if backend == "triton":
        kernels = _triton_kernels(device)
    else:
        kernels = _flashinfer_kernels(device, dtype) if backend == "flashinfer" else _c_kernels(device, dtype)
    if not isinstance(kernels, str):
        return kernels
    if setting == "auto":
        return _create_kernels("torch", f"torch; {backend.title()} {kernels.split(';')[0]}")
    raise ConfigError(f"attention_backend {setting} {kernels}")


class PoolKind(NamedTuple):
    """A kind of KV pools: how many `slots` they have, the `gather` for attention in torch over them, and the page
    `table`, with a `window_map` if they are window pools.
    """

    slots: int
    gather: Gather
    table: PageTable
    window_map: WindowMap | None = None


def bind_layers(
    layers: Sequence[LayerGeometry],
    kinds: Sequence[PoolKind],
    is_windowed: Sequence[bool],
    kernels: Kernels,
    dtypes: tuple[torch.dtype, bool],
) -> tuple[LayerPools, AttentionBackend]:
    """Return the KV pools for the `layers` of one runner, and its attention. `kinds` has the kind of pools that keep
    every token, and that of window pools, in which layer i is if `is_windowed[i]`. Layers of one pool also have the
    same cells, heads and scale. Layers that borrow are in no pool: their attention reads the cells of another layer.
    `dtypes` are the dtype of queries, and whether the pools store FP8.
    """
    pools, parts, places = list[KVPool](), list[AttentionBackend](), dict[int, tuple[int, int]]()
    for windowed, indices in pool_layers(layers, is_windowed):
        pool, attention = bind_attention([layers[i] for i in indices], kinds[windowed], *dtypes, kernels)
        places.update({layer: (len(parts), own_layer) for own_layer, layer in enumerate(indices)})
        pools.append(pool)
        parts.append(attention)
    layer_pools = LayerPools(pools, kinds[0].slots, dtypes[0])
    if len(parts) == 1 and len(places) == len(layers):
        return layer_pools, parts[0]
    lenders = [index if layer.borrows is None else layer.borrows for index, layer in enumerate(layers)]
    return layer_pools, LayeredAttention(parts, [places[lender] for lender in lenders])


def bind_to_target(
    layers: Sequence[LayerGeometry],
    target_layers: Sequence[LayerGeometry],
    target_pools: LayerPools,
    kinds: Sequence[PoolKind],
    is_windowed: Sequence[bool],
    kernels: Kernels,
) -> tuple[LayerPools, AttentionBackend]:
    """Return the attention of a draft that keeps no KV: layer i reads the cells of layer `borrows` of the target. The
    draft has no pools. `target_layers`, `target_pools`, `kinds` and `is_windowed` are as in `bind_layers` for the
    target.
    """
    # FlashInfer's plans are for rows that see themselves, and these rows see only committed tokens.
    backend = "triton" if kernels.flashinfer is not None else kernels.name
    parts, places = list[AttentionBackend](), dict[int, tuple[int, int]]()
    for (windowed, indices), pool in zip(pool_layers(target_layers, is_windowed), target_pools.all, strict=True):
        own_layers = {number: layer for number, layer in enumerate(layers) if layer.borrows in indices}
        if not own_layers:
            continue
        first, *_ = own_layers.values()
        kind, windows = kinds[windowed], {layer.borrows: layer.visible_span for layer in own_layers.values()}
        pages = kind.gather if backend == "torch" else kind.table
        shape = AttentionShape(first.heads, tuple(windows.get(index) for index in indices), first.scale)
        arguments = () if kernels.library is None else (kernels.library,)
        places |= {
            number: (len(parts), indices.index(layer.borrows))
            for number, layer in own_layers.items()
            if layer.borrows is not None
        }
        parts.append(implementation("attention", backend)(pool, pages, shape, *arguments))
    no_pools = LayerPools([], target_pools.slots, target_pools.dtype)
    return no_pools, LayeredAttention(parts, [places[number] for number in range(len(layers))])


def bind_attention(
    layers: Sequence[LayerGeometry], kind: PoolKind, dtype: torch.dtype, fp8: bool, kernels: Kernels
) -> tuple[KVPool, AttentionBackend]:
    """Return a KV pool of this `kind` for `layers` of one runner, which have the same cells, heads and scale, and the
    attention of `kernels` bound to it. The pool stores cells in FP8 if `fp8` is True, otherwise in `dtype`. Queries are
    in `dtype`.
    """
    geometry, library_of_pool = layers[0], {} if kernels.library is None else {"library": kernels.library}
    pool = implementation("pool", kernels.name)(
        *(len(layers), kind.slots, geometry.cell, dtype, kind.table.device, fp8, kind.window_map),
        **library_of_pool,
    )
    extra_arguments: tuple[Any, ...] = ()
    if kernels.flashinfer is not None:
        extra_arguments = kernels.flashinfer, [kernels.flashinfer.share(layer) for layer in layers]
    elif kernels.library is not None:
        extra_arguments = (kernels.library,)
    # Attention in torch gathers cells by their slots (`Gather`); other attention reads the page table itself.
    pages = kind.gather if kernels.name == "torch" else kind.table
    shape = AttentionShape(geometry.heads, tuple(layer.visible_span for layer in layers), geometry.scale)
    return pool, implementation("attention", kernels.name)(pool, pages, shape, *extra_arguments)


def sampler_of(kernels: Kernels) -> Sampler:
    """Return the sampler of the same backend as `kernels`."""
    sampler: Sampler = _instance("sampler", kernels)
    return sampler


def lookup_of(kernels: Kernels) -> Lookup:
    """Return the lookup of tokens of the same backend as `kernels`."""
    lookup: Lookup = _instance("lookup", kernels)
    return lookup


def tree_backend_of(kernels: Kernels) -> TreeBackend:
    """Return the functions that handle draft trees, of the same backend as `kernels`."""
    return TreeBackend(_function("growth", kernels), _function("select", kernels), _function("accept", kernels))


def chances_of(kernels: Kernels, device: torch.device) -> NodeChances:
    """Return new chances of acceptance of drafted nodes, of the same backend as `kernels`."""
    chances: NodeChances = _instance("chances", kernels, device)
    return chances


def lookup_chances_of(kernels: Kernels, device: torch.device) -> LookupChances:
    """Return new chances of looked-up tokens, of the same backend as `kernels`."""
    chances: LookupChances = _instance("lookup_chances", kernels, device)
    return chances


def add_looked_up_of(kernels: Kernels) -> AddLookedUp:
    """Return the function that adds looked-up tokens to trees, of the same backend as `kernels`."""
    add_looked_up: AddLookedUp = _function("add_looked_up", kernels)
    return add_looked_up


def bitmask_of(kernels: Kernels) -> ApplyTokenBitmask:
    """Return the function that applies token bitmasks to logits, of the same backend as `kernels`."""
    apply_bitmask: ApplyTokenBitmask = _function("bitmask", kernels)
    return apply_bitmask


def _function(kind: str, kernels: Kernels) -> Any:
    """Return the function that serves `kind`. For C, the class or function of the table takes the compiled library."""
    function_or_class = implementation(kind, kernels.name)
    return function_or_class if kernels.library is None else function_or_class(kernels.library)


def _instance(kind: str, kernels: Kernels, *arguments: Any) -> Any:
    """Return an instance of the class that serves `kind`. The classes for C take the compiled library before
    `arguments`.
    """
    library_argument = () if kernels.library is None else (kernels.library,)
    return implementation(kind, kernels.name)(*library_argument, *arguments)


def _create_kernels(backend: str, *arguments: Any) -> Kernels:
    kernels: Kernels = implementation("kernels", backend)(*arguments)
    return kernels


def _c_kernels(device: torch.device, dtype: torch.dtype) -> Kernels | str:
    """Return the kernels in C, or why they are not available."""
    if device.type != "cpu":
        return f"runs on a CPU and device is {device.type}; set attention_backend to auto"
    if dtype not in KIND_NAMES:
        supported = ", ".join(str(supported_dtype).removeprefix("torch.") for supported_dtype in KIND_NAMES)
        return f"computes in {supported}, and dtype is {str(dtype).removeprefix('torch.')}; set one of them, or auto"
    if (compiled := library()) is None:
        return "is not compiled here; install gcc or clang, or set attention_backend to auto"
    return _create_kernels("c", compiled, dtype)


def _triton_kernels(device: torch.device) -> Kernels | str:
    """Return the kernels in Triton, or why they are not available."""
    if importlib.util.find_spec("triton") is None:
        return "is not installed; pip install triton, or set attention_backend to auto"
    interpreted = importlib.import_module(IMPLEMENTATIONS["kernels"]["triton"].partition(":")[0]).INTERPRETED
    if device.type != "cuda" and not interpreted:
        return (
            f"runs on a GPU and device is {device.type}; set attention_backend to auto, or TRITON_INTERPRET=1 in the "
            "environment, which is slow"
        )
    return _create_kernels("triton")


def _flashinfer_kernels(device: torch.device, dtype: torch.dtype) -> Kernels | str:
    """Return FlashInfer's attention with Triton's kernels, or why they are not available."""
    module = flashinfer_library.find(device, dtype)
    if isinstance(module, str) or isinstance(triton := _triton_kernels(device), str):
        return module if isinstance(module, str) else triton
    return _create_kernels("flashinfer", module)
