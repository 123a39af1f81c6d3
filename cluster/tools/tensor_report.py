"""A report on a checkpoint, tensor by tensor, and on how it would be served. Only headers are read, no weights.

The loading code builds the models on torch's meta device, so the report says exactly what loading would do.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch

from cluster.arch import DraftSpec, TargetArch, read_draft, read_recurrent_target, read_target
from cluster.arch.draft.sample import read_sample
from cluster.arch.dtypes import cache_dtype, compute_dtype
from cluster.arch.layer import LayerGeometry, moe_of
from cluster.arch.resolve import check_expert_shards
from cluster.config import ConfigError
from cluster.config.tree_shape import DEFAULT_NUM_STEPS
from cluster.distributed.mesh import Shard
from cluster.engine.models import DTYPES
from cluster.kernels import c_quantised
from cluster.kernels.interface import Stack, Weight
from cluster.kernels.quantised import Quantised
from cluster.kernels.torch_kernels import TorchKernels
from cluster.models.checkpoint import Checkpoint, CheckpointMatrix
from cluster.models.context import UNSHARDED, ModelContext, Sharding, describe_expert_placement
from cluster.models.formats import codes_name_of
from cluster.models.load import local_heads
from cluster.models.registry import DRAFTS
from cluster.models.stored import Span
from cluster.models.target import DecoderTarget
from cluster.spec.multilayer import buffer_bytes
from cluster.tools.kv_memory import kv_memory
from cluster.tools.summary import ASSUMED_DEVICE, Report, describe_target, features_of

META = torch.device("meta")
HIDDEN_FIELDS = ("tensor_name_rules", "choices", "ignored_patterns", "token_map", "doubts")
Settings = tuple[dict[str, Any] | None, str | None]  # `speculative_draft_overrides` and `speculative_token_map`


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One tensor: the part of the model that it goes to, its file, and how many of its elements one rank holds
    (`numbers`).
    """

    name: str
    goes_to: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    numbers: int


class TensorRecorder(Checkpoint):
    """A checkpoint without data. It records every tensor that a model reads. After a problem it continues, so that it
    finds all problems.
    """

    def __init__(self, folder: str, stored_name: Any, ignored: tuple[str, ...]) -> None:
        super().__init__(folder, stored_name, ignored, headers_only=True)
        self.placed: list[PlacedTensor] = []
        self.problems: list[str] = []

    def matrix(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        rows: Span | None = None,
        columns: Span | None = None,
        expert: int | None = None,
        device: torch.device | None = None,
    ) -> CheckpointMatrix:
        """Return the tensor without data. If it is missing or wrong, record the problem and return a tensor of the
        right shape; if `shape` is None, raise a ConfigError instead.
        """
        try:
            shard = super().matrix(name, shape, rows, columns, expert)
        except ConfigError as error:
            if shape is None:
                raise
            self.problems.append(str(error))
            self._used.add(self._stored_name(name))
            unsharded = torch.empty(shape if expert is None else shape[1:], device=META)
            shard = unsharded if rows is None else unsharded[rows[0] : rows[1]]
            return shard if columns is None else shard[..., columns[0] : columns[1]]
        stored_name = self._stored_name(name)
        path, file_name, entry = self._files[codes_name_of(self, stored_name)]
        dtype = str(entry.dtype).removeprefix("torch.")
        self.placed.append(PlacedTensor(file_name, name, path.name, dtype, entry.shape, prod(shard.shape)))
        return shard

    def check_only(self, name: str, shape: tuple[int, ...]) -> None:
        """Record that another rank holds this tensor: this rank holds 0 of its elements."""
        super().check_only(name, shape)
        if self.placed and self.placed[-1].goes_to == name:
            self.placed[-1] = replace(self.placed[-1], numbers=0)

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Return how many bytes the tensors take that this rank loads. Quantised tensors that stay packed count with
        their packed size (`tally`), all others as if in `dtype`, also the few that are loaded in a wider dtype.
        """
        converted_elements = sum(tensor.numbers for tensor in self.placed) - self.tally.num_values
        return converted_elements * dtype.itemsize + self.tally.nbytes

    def finish(self) -> list[str]:
        """Return the notes of `Checkpoint.finish`. If the model has left tensors unread, record this as a problem and
        return no notes.
        """
        try:
            return super().finish()
        except ConfigError as error:
            self.problems.append(str(error))
            return []


class CpuPackingKernels(TorchKernels):
    """Packs quantised weights without data as the kernels in C pack them, for a report on serving on a CPU."""

    def keeps_quantised(self, matrix: Quantised, dtype: torch.dtype) -> bool:
        """Return whether the kernels in C keep this format quantised."""
        return c_quantised.supports(matrix)

    def quantised(self, matrix: Quantised, dtype: torch.dtype) -> Weight:
        """Return a weight packed as for the kernels in C; it cannot be multiplied."""
        return c_quantised.CodePanels(c_quantised.in_panels(matrix, dtype), _refuse_product)

    def quantised_stack(self, matrices: Iterable[Quantised], dtype: torch.dtype) -> Stack:
        """Return a stack of expert weights packed as for the kernels in C; it cannot be multiplied."""
        return c_quantised.CodePanelStack(c_quantised.stacked_in_panels(matrices, dtype), _refuse_product)


def _refuse_product(*arguments: object) -> None:
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
        """The context in which models without data are built."""
        context = replace(ModelContext.headers_only(self.sharding), dtype=self.dtype)
        return context if self.device == "cuda" else replace(context, kernels=CpuPackingKernels())


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

    def rank_setup(self, arch: TargetArch) -> RankSetup:
        """Return how a rank computes this target, or a draft of it."""
        dtype = DTYPES[compute_dtype(arch, self.dtype, self.device)]
        return RankSetup(dtype, self.device, self.sharding, self.cache == "fp8_e4m3")


def inspect(
    path: str, draft: str | None, setup: ServingSetup = ServingSetup(), settings: Settings = (None, None)
) -> Report:
    """Return a report on how the target in `path` and the draft in `draft` would be served. Figures per rank are for
    the shards of `ServingSetup.sharding`. If the target is recognised but cannot be served, only the draft is reported.

    Raises:
        ConfigError: `dp` or `ep` does not divide `tp`.
    """
    report, sharding = Report(), setup.sharding
    try:
        arch = read_target(path)
        moe = moe_of(arch.layers)
        if moe is not None or draft is None:
            check_expert_shards(setup.ep, moe)
        rank_setup = setup.rank_setup(arch)
        target_bytes = _target(report, path, arch, rank_setup)
        layers = [local_heads(g, sharding.attention) for g in arch.layers]
    except ConfigError as error:
        report.problems.append(str(error))
        if draft is not None:
            _inspect_draft_only(report, path, draft, setup, settings)
        return report
    dtype_name = str(rank_setup.dtype).removeprefix("torch.")
    report.memory = {
        "tp": setup.tp,
        "dp": setup.dp,
        "ep": setup.ep,
        "dtype": dtype_name,
        "kv_cache_dtype": cache_dtype(setup.cache, dtype_name),
        "device": setup.device,
        "target_bytes_per_rank": target_bytes,
        "draft_bytes_per_rank": 0,
        **kv_memory([layers], cache_dtype(setup.cache, dtype_name), arch.max_position, setup.device),
    }
    report.features = features_of(arch)
    if moe is not None and setup.tp > 1:
        report.features["experts_on"] = describe_expert_placement(moe, setup.ep, setup.tp)
    if draft is not None:
        try:
            _draft(report, draft, arch, layers, rank_setup, settings)
        except ConfigError as error:
            report.problems.append(str(error))
    return report


def _inspect_draft_only(report: Report, path: str, draft: str, setup: ServingSetup, settings: Settings) -> None:
    """Add the draft to the report if its target is recognised but cannot be served; otherwise add nothing. The memory
    covers the draft only.
    """
    try:
        arch = read_recurrent_target(path)
        if arch is None:
            return
        report.target = {"folder": path, "family": arch.family, "served": False, "tensors": []}
        report.memory = {"draft_bytes_per_rank": 0, "kv_bytes_per_token": 0}
        report.features = {"checked": "the draft alone"}
        _draft(report, draft, arch, [], setup.rank_setup(arch), settings)
    except ConfigError as error:
        if str(error) not in report.problems:
            report.problems.append(str(error))


def _target(report: Report, path: str, arch: TargetArch, rank_setup: RankSetup) -> int:
    """Add the target to the report; return the bytes of its weights on one rank."""
    recorder = TensorRecorder(path, arch.stored_name, arch.ignored_patterns)
    target = DecoderTarget(arch, recorder, rank_setup.context)
    report.target = {**describe_target(path, arch), "tensors": [asdict(placed) for placed in recorder.placed]}
    if target.quantised:
        report.target["quantised"] = target.quantised
    report.problems += recorder.problems
    return recorder.bytes_in(rank_setup.dtype)


def _draft(
    report: Report,
    path: str,
    arch: TargetArch,
    target_layers: list[LayerGeometry],
    rank_setup: RankSetup,
    settings: Settings,
) -> None:
    """Add the draft to the report. A draft of several MTP layers has one runner per layer, and other drafts have
    one runner. The KV memory is that of the runners and of `target_layers`, with the heads of one rank. The memory
    counts the runners that are loaded with the default `speculative_num_steps`.
    """
    spec: DraftSpec = read_draft(path, Checkpoint(path).shapes, arch, *settings)
    dtype, sharding = rank_setup.dtype, rank_setup.sharding
    moe = moe_of(layer.geometry for layer in spec.layers)
    if moe is not None or moe_of(arch.layers) is None:
        check_expert_shards(sharding.experts.size, moe)
    tensors, draft_bytes, loaded_runners, quantised = [], 0, min(spec.runners, DEFAULT_NUM_STEPS), list[str]()
    for runner in range(spec.runners):
        recorder = TensorRecorder(path, partial(spec.stored_name, runner=runner), spec.ignored_by(runner))
        quantised = DRAFTS[spec.kind](spec, recorder, rank_setup.context).quantised
        tensors += [{**asdict(placed), "runner": runner} for placed in recorder.placed]
        if runner < loaded_runners:
            draft_bytes += recorder.bytes_in(dtype)
        report.problems += recorder.problems
    draft_layers = [local_heads(layer.geometry, sharding.attention) for layer in spec.layers]
    shared_tensors = [name for name, source in (("embedding", spec.embed), ("head", spec.head)) if source == "target"]
    report.draft = {"folder": path, **asdict(spec.info()), "shared_with_target": shared_tensors, "tensors": tensors}
    report.draft["sample"] = read_sample(path, spec.vocab_size, spec.hidden) is not None
    if moe is not None and sharding != UNSHARDED:
        report.draft["experts_on"] = describe_expert_placement(moe, sharding.experts.size, sharding.mlp.size)
    report.draft["spec"] = {k: v for k, v in asdict(spec).items() if k not in HIDDEN_FIELDS}
    if quantised:
        report.draft["quantised"] = quantised
    report.memory["draft_bytes_per_rank"] = draft_bytes
    runners = [target_layers, *[draft_layers] * loaded_runners]
    dtype_name = str(dtype).removeprefix("torch.")
    kv_dtype = cache_dtype("fp8_e4m3" if rank_setup.fp8_cache else "auto", dtype_name)
    buffers = buffer_bytes(loaded_runners, spec.hidden, dtype)
    report.memory |= kv_memory(runners, kv_dtype, arch.max_position, rank_setup.device, buffers)
    report.features["speculation"] = spec.algorithm
    if sharding != UNSHARDED and spec.runners > 1:
        report.features["draft_runners"] = spec.runners
