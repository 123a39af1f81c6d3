"""Architectures read from `config.json`: what a target is, and the one frozen `DraftSpec` of a draft."""

from cluster.arch.draft import DraftLayer, DraftSpec, aux_boundaries, read_draft
from cluster.arch.keys import Shapes, read_json
from cluster.arch.target import TARGET_FAMILIES, LayerGeometry, Rope, TargetArch, read_target

__all__ = [
    "TARGET_FAMILIES",
    "DraftLayer",
    "DraftSpec",
    "LayerGeometry",
    "Rope",
    "Shapes",
    "TargetArch",
    "aux_boundaries",
    "read_draft",
    "read_json",
    "read_target",
]
