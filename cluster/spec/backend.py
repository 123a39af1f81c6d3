"""The functions of a kernel backend that handle draft trees."""

from typing import NamedTuple

from cluster.spec.row_budget import SelectNodes
from cluster.spec.tree import GrowthFactory
from cluster.spec.verify import Accept


class TreeBackend(NamedTuple):
    """How draft trees grow, which of their nodes are verified, and how the accepted path of a tree is found."""

    create_growth: GrowthFactory
    select_nodes: SelectNodes
    accept: Accept
