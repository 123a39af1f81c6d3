"""Where the ranks of a gang run: one bundle per rank in one placement group; the ranks of a node are consecutive."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

Device = Literal["auto", "cpu", "cuda"]
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
ACCELERATOR_SHARE = 0.001  # Ray's convention: a sliver of `accelerator_type:X` pins a bundle to nodes that have it


class PlacementError(RuntimeError):
    """The cluster has no room for the gang; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles that a gang asks for, one per rank, and how long it waits for them."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: Strategy = "PACK"
    timeout_s: float = 120.0

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.bundles)


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement group that is ready. `order[rank]` is the bundle of a rank, `nodes[rank]` the node it is on."""

    group: PlacementGroup
    order: tuple[int, ...]
    nodes: tuple[str, ...]
    layout: Layout

    def options(self, rank: int) -> dict[str, Any]:
        """Actor options that put a rank on its bundle and give it the bundle's resources."""
        bundle = dict(self.layout.bundles[self.order[rank]])
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.order[rank]
        )
        return {
            "num_cpus": bundle.pop("CPU", 0.0),
            "num_gpus": bundle.pop("GPU", 0.0),
            "memory": bundle.pop("memory", None),
            "resources": bundle,
            "scheduling_strategy": strategy,
        }

    async def renew(self, timeout_s: float) -> "Placement":
        """The same group as it is now: Ray moves the bundles of a dead node to other nodes.

        Raises:
            PlacementError: no room for them was found within `timeout_s`.
        """
        if not await asyncio.to_thread(self.group.wait, timeout_s):
            raise PlacementError(_missing(self.layout, timeout_s))
        return _placed(self.group, self.layout)

    def remove(self) -> None:
        """Give the bundles back; Ray ends what still runs on them."""
        remove_placement_group(self.group)


async def reserve(layout: Layout, name: str) -> Placement:
    """Create the placement group and wait until every bundle has its resources.

    Raises:
        PlacementError: they are not free within `layout.timeout_s`.
    """
    group = placement_group([dict(bundle) for bundle in layout.bundles], strategy=layout.strategy, name=name)
    try:
        ready = await asyncio.to_thread(group.wait, layout.timeout_s)
        if not ready:
            raise PlacementError(_missing(layout, layout.timeout_s))
        return _placed(group, layout)
    except BaseException:
        remove_placement_group(group)
        raise


def _placed(group: PlacementGroup, layout: Layout) -> Placement:
    """Assign ranks to the bundles of a group that is ready."""
    node_of = placement_group_table(group)["bundles_to_node_id"]
    order = rank_order(node_of, ray.get_runtime_context().get_node_id())
    return Placement(group, order, tuple(node_of[bundle] for bundle in order), layout)


def rank_order(node_of: Mapping[int, str], own_node: str) -> tuple[int, ...]:
    """Bundle indices by rank: bundles of one node stay together, the caller's node first, then the fullest nodes.

    Ray numbers bundles in the order they were asked for, which says nothing about nodes.
    """
    count: dict[str, int] = {}
    for node in node_of.values():
        count[node] = count.get(node, 0) + 1
    return tuple(sorted(node_of, key=lambda i: (node_of[i] != own_node, -count[node_of[i]], node_of[i], i)))


def _missing(layout: Layout, waited_s: float) -> str:
    """Say which resources fall short, comparing the whole demand with what the cluster has and has free."""
    demand: dict[str, float] = {}
    for bundle in layout.bundles:
        for name, amount in bundle.items():
            demand[name] = demand.get(name, 0.0) + amount
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    short = [
        f"{name}: needs {amount:g}, cluster has {total.get(name, 0.0):g}, free {free.get(name, 0.0):g}"
        for name, amount in sorted(demand.items())
        if free.get(name, 0.0) < amount
    ]
    without = "GPU" in demand and not total.get("GPU")
    remedy = "set device to cpu, or add nodes with GPUs" if without else ""
    reason = "; ".join(short) or f"enough is free in total, but not as strategy {layout.strategy} needs it on the nodes"
    return f"no room for {layout.world} rank(s) after {waited_s:g} s ({reason}); " + (
        remedy or "add nodes, free resources, or change placement_group_config"
    )


def cluster_gpus() -> float:
    """How many GPUs the connected cluster has now."""
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return total.get("GPU", 0.0)


def device_of(
    asked: Device, bundles: Sequence[Mapping[str, float]] | None, accelerator_type: str | None, gpus: float
) -> tuple[Literal["cpu", "cuda"], str]:
    """What every rank runs on, and why; `bundles` are those of a placement_group_config, `gpus` the cluster's.

    `auto` follows the bundles where they are given; else it is CUDA if an accelerator type is given or there are GPUs.

    Raises:
        ValueError: device is cuda, and not every given bundle reserves a GPU.
    """
    with_gpu = bundles is not None and all(bundle.get("GPU", 0.0) > 0 for bundle in bundles)
    if asked == "cuda":
        if bundles is not None and not with_gpu:
            raise ValueError("device is cuda but placement_group_config gives a rank no GPU; add GPU: 1 to its bundle")
        has = f"the cluster has {gpus:g} GPU(s)" if gpus else "the cluster has no GPU yet"
        return "cuda", f"device: cuda; {has}"
    if asked == "cpu":
        return "cpu", "device: cpu"
    if bundles is not None:
        reserves = "reserves GPUs" if with_gpu else "does not reserve a GPU for each rank"
        return "cuda" if with_gpu else "cpu", f"device: auto; placement_group_config {reserves}"
    if accelerator_type is not None:
        return "cuda", f"device: auto; accelerator_type is {accelerator_type}"
    if gpus > 0:
        return "cuda", f"device: auto; the cluster has {gpus:g} GPU(s)"
    return "cpu", "device: auto; the cluster has no GPU"


def default_bundle(device: Device, accelerator_type: str | None) -> dict[str, float]:
    """The bundle of one rank when placement_group_config names none."""
    if device == "cuda" or accelerator_type is not None:
        return {"CPU": 1.0, "GPU": 1.0}
    return {"CPU": 1.0}


def layout_of(
    world: int,
    *,
    bundle_per_worker: Mapping[str, float] | None = None,
    bundles: Sequence[Mapping[str, float]] | None = None,
    strategy: Strategy = "PACK",
    device: Device = "auto",
    accelerator_type: str | None = None,
) -> Layout:
    """The layout that a placement_group_config asks for; `device` is what `device_of` decided.

    Raises:
        ValueError: the number of bundles is not the number of ranks.
    """
    if bundles is not None and len(bundles) != world:
        raise ValueError(
            f"placement_group_config.bundles has {len(bundles)} entries for {world} rank(s); give one each"
        )
    each = bundles or [bundle_per_worker or default_bundle(device, accelerator_type)] * world
    pin = {} if accelerator_type is None else {f"accelerator_type:{accelerator_type}": ACCELERATOR_SHARE}
    return Layout(tuple({**bundle, **pin} for bundle in each), strategy)
