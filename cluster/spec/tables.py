"""The device tables of a rank that are indexed by request row."""

from dataclasses import dataclass

from cluster.kv.page_table import PageTable
from cluster.sampling.logits_processor import LogitsTables
from cluster.sampling.parameters import SamplingTable
from cluster.spec.inputs import EagleDraftInput


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Tables with an entry for every request row; the last row is that of idle requests.

    `pages` has pages and committed lengths, `sampling` the sampling parameters, `adjusting` penalties and grammars,
    `carried` what requests carry from step to step.
    """

    pages: PageTable
    sampling: SamplingTable
    adjusting: LogitsTables
    carried: EagleDraftInput
