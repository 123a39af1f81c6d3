"""Checks whether the nodes of a cluster can hold the bundles of gangs; if not, says which setting to change.

Nothing here calls Ray. A node is a mapping from each resource to the amount that the node has in total, in use or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Literal

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Resources = Mapping[str, float]
ACCELERATOR_PREFIX = "accelerator_type:"  # Ray gives a node with an accelerator of type X a resource of this name + X
RESOURCE_UNIT = 1e-4  # Ray counts resources in units of this size


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles of a gang (the ranks of one replica), one per rank; the number of gangs (`gangs`); and how long a
    gang waits for free resources. The ranks of each attention group (`group_size` consecutive ranks) should be on one
    node.

    A gang waits `join_wait_s` if the present nodes can never hold it: a cluster that has just started may still lack
    nodes. It waits `busy_wait_s` if other placement groups hold the resources. If one of these groups belongs to a gang
    of the same deployment, which a redeploy in place replaces, it waits `redeploy_wait_s` longer. If `wait_s` is not
    None, it replaces all three times.
    """

    bundles: tuple[Resources, ...]
    strategy: Strategy = "PACK"
    gangs: int = 1
    group_size: int = 1
    join_wait_s: float = 10.0
    busy_wait_s: float = 30.0
    redeploy_wait_s: float = 0.0
    wait_s: float | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.bundles)

    @property
    def demand(self) -> dict[str, float]:
        """The sum of the bundles of one gang."""
        return sum_resources(self.bundles)


def sum_resources(bundles: Sequence[Resources]) -> dict[str, float]:
    """Return the sum of several sets of resources, by name."""
    sums: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            sums[name] = sums.get(name, 0.0) + amount
    return sums


def copies_that_fit(bundle: Resources, node: Resources) -> int:
    """Return how many times a bundle fits on an otherwise empty node; a very large number for an empty bundle."""
    copies = [(node.get(name, 0.0) + RESOURCE_UNIT / 2) / amount for name, amount in bundle.items() if amount > 0]
    return floor(min(copies, default=inf)) if copies else 1 << 30


def gangs_that_fit(layout: Layout, nodes: Sequence[Resources]) -> int:
    """Return how many gangs of this layout fit on otherwise empty nodes.

    The number is exact if all bundles are equal or the strategy is STRICT_PACK; otherwise it may be too large.
    """
    first, strategy = layout.bundles[0], layout.strategy
    if strategy == "STRICT_PACK":
        return sum(copies_that_fit(layout.demand, node) for node in nodes)
    if any(bundle != first for bundle in layout.bundles):
        if strategy == "STRICT_SPREAD" and len(nodes) < layout.world:
            return 0
        return copies_that_fit(layout.demand, sum_resources(nodes))
    copies = [copies_that_fit(first, node) for node in nodes]
    if strategy != "STRICT_SPREAD":
        return sum(copies) // layout.world
    # STRICT_SPREAD: a node holds at most one bundle of each gang, so it holds at most n bundles of n gangs.
    gangs = sum(copies) // layout.world
    while gangs and sum(min(gangs, count) for count in copies) < gangs * layout.world:
        gangs -= 1
    return gangs


def capacity_problem(layout: Layout, nodes: Sequence[Resources]) -> str:
    """Return why these nodes, even if empty, cannot hold all gangs of the layout, and what to change. Return an empty
    string if they can.
    """
    for name in sorted({name for bundle in layout.bundles for name, amount in bundle.items() if amount > 0}):
        if not any(node.get(name, 0.0) > 0 for node in nodes):
            return _missing_resource(name, nodes)
    for bundle in layout.bundles:
        if not any(copies_that_fit(bundle, node) for node in nodes):
            largest = {name: max(node.get(name, 0.0) for node in nodes) for name in bundle}
            return (
                f"placement_group_config: no node holds a bundle of {format_resources(bundle)}; the most that nodes "
                f"have is {format_resources(largest)}: lower the bundle, or add larger nodes"
            )
    fit = gangs_that_fit(layout, nodes)
    if fit >= layout.gangs:
        return ""
    if fit:
        return (
            f"deployment_config.num_replicas: {layout.gangs} gangs of {layout.world} rank(s), "
            f"{format_resources(layout.demand)} each, and the cluster's nodes hold {fit} of them with strategy "
            f"{layout.strategy}: lower num_replicas (or autoscaling_config.min_replicas) to {fit}, or add nodes"
        )
    return _gang_too_large(layout, nodes)


def _gang_too_large(layout: Layout, nodes: Sequence[Resources]) -> str:
    """Return why the nodes can hold each bundle alone but not all bundles of one gang together, and what to change."""
    world, demand = layout.world, f"{layout.world} bundle(s), {format_resources(layout.demand)} in all,"
    equal_bundles = all(bundle == layout.bundles[0] for bundle in layout.bundles)
    copies = [copies_that_fit(layout.bundles[0], node) for node in nodes] if equal_bundles else []
    if layout.strategy.startswith("STRICT_") and gangs_that_fit(replace(layout, strategy="PACK"), nodes):
        packed = layout.strategy == "STRICT_PACK"
        possible = max(copies, default=0) if packed else sum(count > 0 for count in copies)
        wanted_nodes = "one node" if packed else "as many nodes"
        capacity_text = (
            f", and {'no node holds more than' if packed else 'so many nodes hold one:'} {possible}"
            if equal_bundles
            else ""
        )
        advice = f", or lower tp_size to {possible}" if equal_bundles else ""
        return (
            f"placement_group_config.strategy {layout.strategy}: {demand} have to be on {wanted_nodes}{capacity_text}: "
            f"set strategy to {layout.strategy.removeprefix('STRICT_')}{advice}"
        )
    available = sum_resources(nodes)
    shortages = ", ".join(
        f"{name} {amount:g} of {available.get(name, 0.0):g}"
        for name, amount in layout.demand.items()
        if amount > available.get(name, 0.0)
    )
    return (
        f"tp_size {world}: {demand} are more than all nodes of the cluster hold"
        f"{f' ({shortages})' if shortages else ''}: "
        f"lower tp_size{f' to {sum(copies)}' if equal_bundles else ' or the bundles'}, or add nodes"
    )


def _missing_resource(name: str, nodes: Sequence[Resources]) -> str:
    """Return a message that no node has the resource `name`, and what to change."""
    if name == "GPU":
        return "no node of the cluster has a GPU: set device to cpu, with bundles without GPU, or add nodes with GPUs"
    if not name.startswith(ACCELERATOR_PREFIX):
        return (
            f"placement_group_config asks for {name!r}, and no node of the cluster has it: remove it, or add such nodes"
        )
    accelerator = name.removeprefix(ACCELERATOR_PREFIX)
    accelerators = sorted(
        {
            resource.removeprefix(ACCELERATOR_PREFIX)
            for node in nodes
            for resource in node
            if resource.startswith(ACCELERATOR_PREFIX)
        }
    )
    present = f"nodes have {', '.join(accelerators)}" if accelerators else "no node names any accelerator"
    remedy = (
        f"set it to {accelerators[0]}"
        if len(accelerators) == 1
        else "set it to one that there is"
        if accelerators
        else "remove it"
    )
    return (
        f"accelerator_type {accelerator}: no node of the cluster has it, {present}: {remedy}, or add nodes that have "
        f"""it (Ray finds out by itself what a GPU is; `ray start --resources='{{"{name}": 1}}'` says it by hand)"""
    )


def format_resources(resources: Resources) -> str:
    """Return resources as text, as a config file writes them."""
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in resources.items()) + "}"
