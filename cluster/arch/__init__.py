"""Model architectures read from checkpoint folders: a `TargetArch` for a target, a frozen `DraftSpec` for a draft."""

from cluster.arch.draft import DraftLayer, DraftSpec, aux_boundaries, read_draft
from cluster.arch.keys import Shapes, read_json
from cluster.arch.layer import LatentSizes, LayerGeometry, Moe
from cluster.arch.read import TARGET_FAMILIES, is_mistral_native, read_recurrent_target, read_target
from cluster.arch.rope import Rope
from cluster.arch.target import TargetArch

__all__ = [
    "TARGET_FAMILIES",
    "DraftLayer",
    "DraftSpec",
    "LatentSizes",
    "LayerGeometry",
    "Moe",
    "Rope",
    "Shapes",
    "TargetArch",
    "aux_boundaries",
    "is_mistral_native",
    "read_draft",
    "read_json",
    "read_recurrent_target",
    "read_target",
]
