"""Whether the nodes of a cluster could hold the bundles of gangs, and in words which setting to change if not.

Nothing here asks Ray: nodes are what they say they have in total, by resource, in use or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Literal

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources = Mapping[str, float]
ACCELERATOR = "accelerator_type:"  # Ray's resource of nodes with that kind of accelerator
GRAIN = 1e-4  # Ray counts resources in steps of this size


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles that a gang asks for, one per rank, how many gangs there are to be, and how long one waits for room.
    `group` ranks that follow each other are to be on one node, where that can be.

    It waits `join_s` where no nodes of the cluster could hold it, as a cluster that has just been started may lack some
    yet; `busy_s` where others hold what it needs, and `leaves_s` more if one of them is a gang of its own deployment,
    which a redeploy in place replaces. `wait_s`, if set, stands for all of these.
    """

    bundles: tuple[Resources, ...]
    strategy: Strategy = "PACK"
    gangs: int = 1
    group: int = 1
    join_s: float = 10.0
    busy_s: float = 30.0
    leaves_s: float = 0.0
    wait_s: float | None = None

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.bundles)

    @property
    def demand(self) -> dict[str, float]:
        """All that the bundles of one gang ask for."""
        return total(self.bundles)


def total(bundles: Sequence[Resources]) -> dict[str, float]:
    """The sum of some resources, by name."""
    sums: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def times(bundle: Resources, node: Resources) -> int:
    """How often a node holds a bundle, if nothing else is on it."""
    each = [(node.get(name, 0.0) + GRAIN / 2) / amount for name, amount in bundle.items() if amount > 0]
    return floor(min(each, default=inf)) if each else 1 << 30


def gangs_that_fit(layout: Layout, nodes: Sequence[Resources]) -> int:
    """How many gangs of this layout the nodes hold at most, if nothing else is on them.

    Exact where all bundles are alike or STRICT_PACK; else it may be too many, never too few.
    """
    first, strategy = layout.bundles[0], layout.strategy
    if strategy == "STRICT_PACK":
        return sum(times(layout.demand, node) for node in nodes)
    if any(bundle != first for bundle in layout.bundles):
        if strategy == "STRICT_SPREAD" and len(nodes) < layout.world:
            return 0
        return times(layout.demand, total(nodes))
    held = [times(first, node) for node in nodes]
    if strategy != "STRICT_SPREAD":
        return sum(held) // layout.world
    gangs = sum(held) // layout.world
    while gangs and sum(min(gangs, count) for count in held) < gangs * layout.world:
        gangs -= 1
    return gangs


def never(layout: Layout, nodes: Sequence[Resources]) -> str:
    """Why these nodes could not hold all gangs of the layout even if nothing else were on them, and what to change;
    empty if they could.
    """
    for name in sorted({name for bundle in layout.bundles for name, amount in bundle.items() if amount > 0}):
        if not any(node.get(name, 0.0) > 0 for node in nodes):
            return _nowhere(name, nodes)
    for bundle in layout.bundles:
        if not any(times(bundle, node) for node in nodes):
            most = {name: max(node.get(name, 0.0) for node in nodes) for name in bundle}
            return (
                f"placement_group_config: no node holds a bundle of {shown(bundle)}; the most that nodes have is "
                f"{shown(most)}: lower the bundle, or add larger nodes"
            )
    fit = gangs_that_fit(layout, nodes)
    if fit >= layout.gangs:
        return ""
    if fit:
        return (
            f"deployment_config.num_replicas: {layout.gangs} gangs of {layout.world} rank(s), {shown(layout.demand)} "
            f"each, and the cluster's nodes hold {fit} of them with strategy {layout.strategy}: lower num_replicas "
            f"(or autoscaling_config.min_replicas) to {fit}, or add nodes"
        )
    return _too_large(layout, nodes)


def _too_large(layout: Layout, nodes: Sequence[Resources]) -> str:
    """Why there are nodes for each bundle and not for all of a gang."""
    world, asked = layout.world, f"{layout.world} bundle(s), {shown(layout.demand)} in all,"
    alike = all(bundle == layout.bundles[0] for bundle in layout.bundles)
    held = [times(layout.bundles[0], node) for node in nodes] if alike else []
    if layout.strategy.startswith("STRICT_") and gangs_that_fit(replace(layout, strategy="PACK"), nodes):
        packed = layout.strategy == "STRICT_PACK"
        fewer = max(held, default=0) if packed else sum(count > 0 for count in held)
        where = "one node" if packed else "as many nodes"
        found = f", and {'no node holds more than' if packed else 'so many nodes hold one:'} {fewer}" if alike else ""
        lower = f", or lower tp_size to {fewer}" if alike else ""
        return (
            f"placement_group_config.strategy {layout.strategy}: {asked} have to be on {where}{found}: set strategy to "
            f"{layout.strategy.removeprefix('STRICT_')}{lower}"
        )
    have = total(nodes)
    short = ", ".join(
        f"{name} {amount:g} of {have.get(name, 0.0):g}"
        for name, amount in layout.demand.items()
        if amount > have.get(name, 0.0)
    )
    return (
        f"tp_size {world}: {asked} are more than all nodes of the cluster hold{f' ({short})' if short else ''}: lower "
        f"tp_size{f' to {sum(held)}' if alike else ' or the bundles'}, or add nodes"
    )


def _nowhere(name: str, nodes: Sequence[Resources]) -> str:
    """That no node has any of a resource."""
    if name == "GPU":
        return "no node of the cluster has a GPU: set device to cpu, with bundles without GPU, or add nodes with GPUs"
    if not name.startswith(ACCELERATOR):
        return (
            f"placement_group_config asks for {name!r}, and no node of the cluster has it: remove it, or add such nodes"
        )
    kind = name.removeprefix(ACCELERATOR)
    kinds = sorted({have.removeprefix(ACCELERATOR) for node in nodes for have in node if have.startswith(ACCELERATOR)})
    there = f"nodes have {', '.join(kinds)}" if kinds else "no node names any accelerator"
    remedy = f"set it to {kinds[0]}" if len(kinds) == 1 else "set it to one that there is" if kinds else "remove it"
    return (
        f"accelerator_type {kind}: no node of the cluster has it, {there}: {remedy}, or add nodes that have it (Ray "
        f"""finds out by itself what a GPU is; `ray start --resources='{{"{name}": 1}}'` says it by hand)"""
    )


def shown(resources: Resources) -> str:
    """Resources in words, as a config writes them."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"
