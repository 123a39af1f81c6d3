"""A report on a checkpoint, tensor by tensor, and how it would be served; only headers are read, no weights.

The loading code builds the models on torch's meta device, so the report says exactly what loading would do.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from cluster.arch import DraftSpec, TargetArch, outline, read_draft, read_target
from cluster.arch.draft.sample import read_sample
from cluster.arch.dtypes import cache_dtype, compute_dtype
from cluster.arch.layer import experts_of
from cluster.arch.resolve import check_parts
from cluster.config import ConfigError
from cluster.config.tree_shape import DEFAULT_NUM_STEPS
from cluster.distributed.mesh import Shard
from cluster.engine.models import DTYPES
from cluster.kernels import c_quantised
from cluster.kernels.interface import Stack, Weight
from cluster.kernels.quantised import Quantised
from cluster.kernels.torch_kernels import TorchKernels
from cluster.kv.pool import pool_bytes
from cluster.models.checkpoint import Checkpoint, Matrix
from cluster.models.context import WHOLE, ModelContext, Sharding, where_experts_are
from cluster.models.formats import place_of
from cluster.models.load import local_heads
from cluster.models.registry import DRAFTS
from cluster.models.stored import Span
from cluster.models.target import DecoderTarget
from cluster.spec.multilayer import kept_bytes
from cluster.tools.summary import ASSUMED_DEVICE, Report, described, features_of

META = torch.device("meta")
NOT_SHOWN = ("names", "choices", "ignored_patterns", "token_map", "doubts")
Settings = tuple[dict[str, Any] | None, str | None]  # `speculative_draft_overrides` and `speculative_token_map`


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor: the part of the model that it goes to, its file, and how many of its elements one rank holds."""

    name: str
    goes_to: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    numbers: int


class TensorRecorder(Checkpoint):
    """A checkpoint without data that records every tensor taken, and continues after a problem to find all of them."""

    def __init__(self, folder: str, stored_name: Any, ignored: tuple[str, ...]) -> None:
        super().__init__(folder, stored_name, ignored, dry=True)
        self.placed: list[Placed] = []
        self.problems: list[str] = []

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
        device: torch.device | None = None,
    ) -> Matrix:
        """Return the tensor without data. If it is missing or wrong, record the problem and return a tensor of the
        right shape.
        """
        try:
            cut = super().matrix(name, shape, rows, columns, expert)
        except ConfigError as error:
            if shape is None:
                raise
            self.problems.append(str(error))
            self._taken.add(self._stored_name(name))
            whole = torch.empty(shape if expert is None else shape[1:], device=META)
            cut = whole if rows is None else whole[rows[0] : rows[1]]
            return cut if columns is None else cut[..., columns[0] : columns[1]]
        stored = self._stored_name(name)
        path, raw, entry = self._files[place_of(self, stored)]
        dtype = str(entry.dtype).removeprefix("torch.")
        self.placed.append(Placed(raw, name, path.name, dtype, entry.shape, prod(cut.shape)))
        return cut

    def elsewhere(self, name: str, shape: tuple[int, ...]) -> None:
        """Record that another rank holds this tensor: this rank holds 0 of its elements."""
        super().elsewhere(name, shape)
        if self.placed and self.placed[-1].goes_to == name:
            self.placed[-1] = replace(self.placed[-1], numbers=0)

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Return the bytes of the tensors that this rank loads. Packed tensors (in `tally`) keep their size; all others
        are converted to `dtype`.
        """
        numbers = sum(placed.numbers for placed in self.placed) - self.tally.numbers
        return numbers * dtype.itemsize + self.tally.nbytes

    def finish(self) -> list[str]:
        """Record the tensors that no part of the model took as a problem."""
        try:
            return super().finish()
        except ConfigError as error:
            self.problems.append(str(error))
            return []


class OnCpu(TorchKernels):
    """Packs quantised weights as the kernels in C do, for models without data on a CPU."""

    def keeps(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """Return whether the kernels in C keep this format quantised."""
        return c_quantised.knows(matrix)

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """Return a weight packed as for the kernels in C; it cannot be multiplied."""
        return c_quantised.CodePanels(c_quantised.in_panels(matrix, dtype), _never)

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """Return a stack of expert weights packed as for the kernels in C; it cannot be multiplied."""
        return c_quantised.CodePanelStack(c_quantised.stacked(matrices, dtype), _never)


def _never(*given: object) -> None:
    raise AssertionError("a model without data computes nothing")


@dataclass(frozen=True, slots=True)
class RankSetup:
    """How a rank computes: in `dtype` on `device`, with the shards of `sharding`, and with KV in FP8 if `fp8_cache`."""

    dtype: torch.dtype
    device: str
    sharding: Sharding
    fp8_cache: bool

    @property
    def context(self) -> ModelContext:
        """The context to build models without data."""
        context = replace(ModelContext.dry(self.sharding), dtype=self.dtype)
        return context if self.device == "cuda" else replace(context, kernels=OnCpu())


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """How a model would be served: by `tp` ranks in `dp` attention groups, with experts in `ep` parts, on `device`.
    `cache` is the setting `kv_cache_dtype`.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    dtype: str = "auto"
    device: str = ASSUMED_DEVICE
    cache: str = "auto"

    @property
    def sharding(self) -> Sharding:
        """The shards of rank 0, except that the experts are those of the rank with the most experts.

        Raises:
            ConfigError: `dp` or `ep` does not divide `tp`.
        """
        for flag, parts in (("dp", self.dp), ("ep", self.ep)):
            if self.tp % parts:
                raise ConfigError(f"--{flag} {parts} must divide --tp {self.tp}")
        attention = Shard(0, self.tp // self.dp)
        return Sharding(attention, Shard(0, self.tp), attention, Shard(self.ep - 1, self.ep))

    def rank_of(self, arch: TargetArch) -> RankSetup:
        """Return how a rank computes this target, or a draft of it."""
        compute = DTYPES[compute_dtype(arch, self.dtype, self.device)]
        return RankSetup(compute, self.device, self.sharding, self.cache == "fp8_e4m3")


def inspect(
    path: str, draft: str | None, setup: ServingSetup = ServingSetup(), settings: Settings = (None, None)
) -> Report:
    """Report how the target in `path` and the draft in `draft` would be served; figures per rank are those of
    `ServingSetup.sharding`. If the target is recognised but cannot be served, only the draft is reported.

    Raises:
        ConfigError: `dp` or `ep` does not divide `tp`.
    """
    report, sharding = Report(), setup.sharding
    try:
        arch = read_target(path)
        moe = experts_of(arch.layers)
        if moe is not None or draft is None:
            check_parts(setup.ep, moe)
        place = setup.rank_of(arch)
        taken = _target(report, path, arch, place)
        layers = [local_heads(g, sharding.attention) for g in arch.layers]
    except ConfigError as error:
        report.problems.append(str(error))
        if draft is not None:
            _alone(report, path, draft, setup, settings)
        return report
    compute = str(place.dtype).removeprefix("torch.")
    report.memory = {
        "tp": setup.tp,
        "dp": setup.dp,
        "ep": setup.ep,
        "dtype": compute,
        "kv_cache_dtype": cache_dtype(setup.cache, compute),
        "device": setup.device,
        "target_bytes_per_rank": taken,
        "draft_bytes_per_rank": 0,
        "kv_bytes_per_token": pool_bytes(layers, place.dtype, place.fp8_cache),
    }
    report.features = features_of(arch)
    if moe is not None and setup.tp > 1:
        report.features["experts_on"] = where_experts_are(moe, setup.ep, setup.tp)
    if draft is not None:
        try:
            _draft(report, draft, arch, place, settings)
        except ConfigError as error:
            report.problems.append(str(error))
    return report


def _alone(report: Report, path: str, draft: str, setup: ServingSetup, settings: Settings) -> None:
    """Report the draft of a target that is recognised but cannot be served. The memory covers the draft only."""
    try:
        arch = outline(path)
        if arch is None:
            return
        report.target = {"folder": path, "family": arch.family, "served": False, "tensors": []}
        report.memory = {"draft_bytes_per_rank": 0, "kv_bytes_per_token": 0}
        report.features = {"checked": "the draft alone"}
        _draft(report, draft, arch, setup.rank_of(arch), settings)
    except ConfigError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))


def _target(report: Report, path: str, arch: TargetArch, place: RankSetup) -> int:
    """Add the target to the report; return the bytes of its weights on one rank."""
    recorder = TensorRecorder(path, arch.stored_name, arch.ignored)
    held = DecoderTarget(arch, recorder, place.context)
    report.target = {**described(path, arch), "tensors": [asdict(placed) for placed in recorder.placed]}
    if held.quantised:
        report.target["quantised"] = held.quantised
    report.problems += recorder.problems
    return recorder.bytes_in(place.dtype)


def _draft(report: Report, path: str, arch: TargetArch, place: RankSetup, settings: Settings) -> None:
    """Add the draft to the report. Its memory counts the runners that the default `speculative_num_steps` loads."""
    spec: DraftSpec = read_draft(path, Checkpoint(path).shapes, arch, *settings)
    compute, sharding = place.dtype, place.sharding
    moe = experts_of(layer.geometry for layer in spec.layers)
    if moe is not None or experts_of(arch.layers) is None:
        check_parts(sharding.experts.size, moe)
    tensors, taken, loaded, quantised = [], 0, min(spec.runners, DEFAULT_NUM_STEPS), list[str]()
    for runner in range(spec.runners):
        recorder = TensorRecorder(path, partial(spec.stored_name, runner=runner), spec.ignored(runner))
        quantised = DRAFTS[spec.kind](spec, recorder, place.context).quantised
        tensors += [{**asdict(placed), "runner": runner} for placed in recorder.placed]
        if runner < loaded:
            taken += recorder.bytes_in(compute)
        report.problems += recorder.problems
    own = [local_heads(layer.geometry, sharding.attention) for layer in spec.layers]
    shared = [name for name, source in (("embedding", spec.embed), ("head", spec.head)) if source == "target"]
    report.draft = {"folder": path, **asdict(spec.info()), "shared_with_target": shared, "tensors": tensors}
    report.draft["sample"] = read_sample(path, spec.vocab_size, spec.hidden) is not None
    if moe is not None and sharding != WHOLE:
        report.draft["experts_on"] = where_experts_are(moe, sharding.experts.size, sharding.mlp.size)
    report.draft["spec"] = {k: v for k, v in asdict(spec).items() if k not in NOT_SHOWN}
    if quantised:
        report.draft["quantised"] = quantised
    report.memory["draft_bytes_per_rank"] = taken
    cells = loaded * pool_bytes(own, compute, place.fp8_cache)
    kept = kept_bytes(loaded, spec.hidden, compute)
    report.memory["kv_bytes_per_token"] += cells + kept
    report.features["speculation"] = spec.algorithm
    if sharding != WHOLE and spec.runners > 1:
        report.features["draft_runners"] = spec.runners
