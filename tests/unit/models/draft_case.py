"""What the registries of draft dialects consist of (`draft_cases`, `mtp_cases`)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from tests.parity.reference import TargetPass, target_reference
from tests.support.tiny_checkpoints import target_folder


class Oracle(Protocol):
    """A dense reference of a draft; see `draft_reference`."""

    def fuse(self, target_pass: TargetPass) -> Tensor: ...

    def run(self, next_tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Case:
    """A draft of one dialect in one shape.

    `folder` writes the draft, `conventions` are the reference's, `expected_spec` are fields of the resolved spec.
    """

    family: str
    description: str
    folder: Callable[[], str]
    reference: Callable[..., Oracle]
    conventions: dict[str, Any]
    expected_spec: dict[str, Any] = field(default_factory=dict)
    target: Callable[[], str] = target_folder
    source: str = "dense reference, float64"

    def oracle(self) -> Oracle:
        return self.reference(self.folder(), target_reference(self.target()), **self.conventions)


@dataclass(frozen=True)
class DraftRow:
    """A row of the documented table for a draft that has no dense reference of its own in this file.

    Such a draft is a list of draft runners, or it needs a certain target.
    """

    family: str
    description: str
    folder: Callable[[], str]
    source: str
