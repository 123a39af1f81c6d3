"""Placement of a gang: a placement group with one bundle per rank, with each attention group on one node if possible.
This module also chooses the device and the bundles.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors.cluster_capacity import (
    ACCELERATOR_PREFIX,
    Layout,
    Strategy,
    capacity_problem,
    format_resources,
    sum_resources,
)

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda"]
ACCELERATOR_SHARE = 0.001  # a bundle that asks for a little of `accelerator_type:X` is placed on nodes with X only
CHECK_PERIOD_S = 1.0  # seconds between two checks of whether a gang has its resources, and if not, why


class PlacementError(RuntimeError):
    """The cluster cannot hold the gang now. The message says what is missing, and what to change if that is known."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A ready placement group. `bundle_of_rank[rank]` is the index of a rank's bundle, `node_of_rank[rank]` the Ray id
    of its node.
    """

    group: PlacementGroup
    bundle_of_rank: tuple[int, ...]
    node_of_rank: tuple[str, ...]
    layout: Layout

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Return the actor options that put a rank on its bundle, with the bundle's resources."""
        bundle = dict(self.layout.bundles[self.bundle_of_rank[rank]])
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle_of_rank[rank]
        )
        return {
            "num_cpus": bundle.pop("CPU", 0.0),
            "num_gpus": bundle.pop("GPU", 0.0),
            "memory": bundle.pop("memory", None),
            "resources": bundle,
            "scheduling_strategy": strategy,
        }

    async def renew(self, timeout_s: float) -> "Placement":
        """Wait until the placement group is ready again, and return a placement with the group's present nodes. Ray
        moves the bundles of a dead node to other nodes.

        Raises:
            PlacementError: Ray found no nodes for the bundles within `timeout_s`.
        """
        if not await asyncio.to_thread(self.group.wait, timeout_s):
            shortage = await asyncio.to_thread(_shortage_of, self.layout, "")
            raise PlacementError(f"no room for {self.layout.world} rank(s) after {timeout_s:.0f} s: {shortage.reason}")
        return _placed(self.group, self.layout)

    def remove(self) -> None:
        """Release the bundles; Ray ends the actors that still run on these bundles."""
        remove_placement_group(self.group)


async def reserve(layout: Layout, name: str) -> Placement:
    """Create the placement group `name`, and wait until every bundle has its resources. The times in `layout` limit the
    wait. During the wait, the log says which resources are missing.

    Raises:
        PlacementError: the resources were not free in time.
    """
    group = placement_group([dict(bundle) for bundle in layout.bundles], strategy=layout.strategy, name=name)
    started_at, last_reason = time.monotonic(), ""
    try:
        while not await asyncio.to_thread(group.wait, CHECK_PERIOD_S):
            shortage = await asyncio.to_thread(_shortage_of, layout, name)
            waited_s, limit_s = (
                time.monotonic() - started_at,
                shortage.wait_s if layout.wait_s is None else layout.wait_s,
            )
            if waited_s >= limit_s:
                raise PlacementError(f"no room for {layout.world} rank(s) after {waited_s:.0f} s: {shortage.reason}")
            if shortage.reason != last_reason:
                last_reason = shortage.reason
                logger.warning("gang %s waits for room, up to %.0f s: %s", name, limit_s, last_reason)
        return _placed(group, layout)
    except BaseException:
        remove_placement_group(group)
        raise


def _placed(group: PlacementGroup, layout: Layout) -> Placement:
    """Assign each rank to one bundle of the placement group `group`, which must be ready."""
    node_of = placement_group_table(group)["bundles_to_node_id"]
    bundle_of_rank = bundle_of_each_rank(node_of, ray.get_runtime_context().get_node_id(), layout.group_size)
    return Placement(group, bundle_of_rank, tuple(node_of[bundle] for bundle in bundle_of_rank), layout)


def bundle_of_each_rank(node_of: Mapping[int, str], own_node: str, group_size: int = 1) -> tuple[int, ...]:
    """Return the bundle of each rank, given the node of each bundle (`node_of`). `own_node` is the caller's node,
    `group_size` the size of an attention group.

    Each node's bundles are cut into attention groups of `group_size` bundles. The bundles left over on all nodes then
    form groups that span nodes. Nodes are sorted: the caller's node first, then nodes with more bundles, then by lowest
    bundle index. Groups with a bundle on the caller's node come first. The bundle indices themselves say nothing about
    nodes: Ray numbers bundles in the order in which they were requested.
    """
    bundles_of_node: dict[str, list[int]] = {}
    for bundle in sorted(node_of):
        bundles_of_node.setdefault(node_of[bundle], []).append(bundle)

    def sorted_nodes(bundle_lists: list[list[int]]) -> list[list[int]]:
        return sorted(bundle_lists, key=lambda bundles: (node_of[bundles[0]] != own_node, -len(bundles), bundles[0]))

    nodes = sorted_nodes([*bundles_of_node.values()])
    groups = [
        node[start : start + group_size] for node in nodes for start in range(0, len(node) - group_size + 1, group_size)
    ]
    leftover_lists = sorted_nodes(
        [leftover for node in nodes if (leftover := node[len(node) // group_size * group_size :])]
    )
    leftovers = [bundle for leftover in leftover_lists for bundle in leftover]
    groups += [leftovers[start : start + group_size] for start in range(0, len(leftovers), group_size)]
    groups.sort(key=lambda group_bundles: all(node_of[bundle] != own_node for bundle in group_bundles))
    return tuple(bundle for group_bundles in groups for bundle in group_bundles)


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Why a gang cannot get its resources now, and for how long the gang may wait for them."""

    reason: str
    wait_s: float


def _shortage_of(layout: Layout, name: str) -> _Shortage:
    """Return why the gang `name` has no bundles yet, and how long it may wait for them. Either the nodes cannot hold
    the gang even if they are empty, or other placement groups hold the resources.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    if reason := capacity_problem(layout, nodes):
        join_hint = "; if nodes are still to join, placement_group_config.wait_s says how long to wait for them"
        return _Shortage(reason + join_hint, layout.join_wait_s)
    total_resources, free = sum_resources(nodes), ray.available_resources()  # type: ignore[no-untyped-call]
    shortages = [
        f"{resource}: needs {amount:g}, free {free.get(resource, 0.0):g} of {total_resources.get(resource, 0.0):g}"
        for resource, amount in sorted(layout.demand.items())
        if free.get(resource, 0.0) < amount
    ]
    description = (
        "; ".join(shortages) or f"enough is free in total, but not as strategy {layout.strategy} needs it on the nodes"
    )
    holders = _other_holders(layout, name)
    held_text = (
        f", held by {', '.join(f'{holder} {format_resources(resources)}' for holder, resources in holders.items())}"
        if holders
        else ""
    )
    deployment = name.rpartition("/")[0]
    redeploy_wait_s = (
        layout.redeploy_wait_s if any(deployment and holder.startswith(f"{deployment}/") for holder in holders) else 0.0
    )
    remedy = "end what holds them, add nodes, or ask for less: tp_size, deployment_config, placement_group_config"
    return _Shortage(f"{description}{held_text}; {remedy}", layout.busy_wait_s + redeploy_wait_s)


def _other_holders(layout: Layout, name: str) -> dict[str, dict[str, float]]:
    """Return the resources that other placement groups hold, by group name. Only resources that `layout` needs are
    counted. If `layout` needs GPUs, only GPUs are counted.
    """
    counted_resources = ("GPU",) if "GPU" in layout.demand else tuple(layout.demand)
    holders: dict[str, dict[str, float]] = {}
    for group in placement_group_table().values():
        if group["state"] != "CREATED" or group["name"] == name:
            continue
        held_resources = {
            key: n for key, n in sum_resources(list(group["bundles"].values())).items() if key in counted_resources
        }
        if held_resources:
            holders[group["name"] or "a placement group without a name"] = held_resources
    return holders


def cluster_gpus() -> float:
    """Return how many GPUs the connected cluster has now."""
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources.get("GPU", 0.0)


def device_of(
    requested: Device, bundles: Sequence[Mapping[str, float]] | None, accelerator_type: str | None, gpus: float
) -> tuple[Literal["cpu", "cuda"], str]:
    """Return the device of all ranks, and the reason. `requested` is the setting `device`, `bundles` are the bundles of
    placement_group_config (None if not given), `gpus` is the number of GPUs in the cluster.

    If bundles are given, `auto` means cuda only if every bundle reserves a GPU. If no bundles are given, `auto` means
    cuda only if an accelerator type is given or the cluster has GPUs.

    Raises:
        ValueError: `requested` is cuda, and a given bundle reserves no GPU.
    """
    with_gpu = bundles is not None and all(bundle.get("GPU", 0.0) > 0 for bundle in bundles)
    if requested == "cuda":
        if bundles is not None and not with_gpu:
            raise ValueError("device is cuda but placement_group_config gives a rank no GPU; add GPU: 1 to its bundle")
        gpu_text = f"the cluster has {gpus:g} GPU(s)" if gpus else "the cluster has no GPU yet"
        return "cuda", f"device: cuda; {gpu_text}"
    if requested == "cpu":
        return "cpu", "device: cpu"
    if bundles is not None:
        reserves = "reserves GPUs" if with_gpu else "does not reserve a GPU for each rank"
        return "cuda" if with_gpu else "cpu", f"device: auto; placement_group_config {reserves}"
    if accelerator_type is not None:
        return "cuda", f"device: auto; accelerator_type is {accelerator_type}"
    if gpus > 0:
        return "cuda", f"device: auto; the cluster has {gpus:g} GPU(s)"
    return "cpu", "device: auto; the cluster has no GPU"


def check_gpu_shares(bundles: Sequence[Mapping[str, float]]) -> None:
    """Check how much of a GPU each rank gets if the device is CUDA. `bundles` holds one bundle per rank.

    Raises:
        ValueError: a rank would get more than one GPU, or a gang of several ranks would share GPUs.
    """
    for bundle in bundles:
        share = bundle.get("GPU", 0.0)
        if share > 1:
            raise ValueError(
                f"placement_group_config gives a rank {share:g} GPUs, and it computes on one; set GPU: 1 in its bundle "
                "and tp_size to the number of GPUs"
            )
        if share < 1 and len(bundles) > 1:
            raise ValueError(
                f"placement_group_config gives a rank {share:g} of a GPU, and ranks of one gang cannot share one; set "
                "GPU: 1 in its bundle. A gang of one rank may have a part, with as much in mem_fraction_static"
            )


def default_bundle(device: Device, accelerator_type: str | None) -> dict[str, float]:
    """Return the bundle that a rank gets if placement_group_config has no bundles."""
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
    """Return the layout of `world` ranks. If `bundles` is given, it has one bundle per rank. Otherwise every rank gets
    `bundle_per_worker`, or the bundle of `default_bundle` if `bundle_per_worker` is not given either. With `device`
    auto, the default bundle has no GPU unless `accelerator_type` is given.

    Raises:
        ValueError: the number of `bundles` is not `world`.
    """
    if bundles is not None and len(bundles) != world:
        raise ValueError(
            f"placement_group_config.bundles has {len(bundles)} entries for {world} rank(s); give one each"
        )
    rank_bundles = bundles or [bundle_per_worker or default_bundle(device, accelerator_type)] * world
    accelerator = {} if accelerator_type is None else {f"{ACCELERATOR_PREFIX}{accelerator_type}": ACCELERATOR_SHARE}
    return Layout(tuple({**bundle, **accelerator} for bundle in rank_bundles), strategy)
