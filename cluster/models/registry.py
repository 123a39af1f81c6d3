"""Checks models by the headers of their checkpoints, and loads them. Has the table of draft classes."""

from functools import partial

from cluster.arch import DraftSpec, TargetArch
from cluster.arch.draft import Kind
from cluster.models.checkpoint import Checkpoint
from cluster.models.context import ModelContext
from cluster.models.draft import DraftModel
from cluster.models.eagle1 import Eagle1Draft
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.frozen_kv import FrozenKvDraft
from cluster.models.target import DecoderTarget, read_embed_and_head, target_checkpoint
from cluster.models.vocab import select_head_columns

DRAFTS: dict[Kind, type[Eagle3Draft] | type[Eagle1Draft] | type[FrozenKvDraft]] = {
    "eagle3": Eagle3Draft,
    "eagle1": Eagle1Draft,
    "mistral": Eagle1Draft,
    "mtp": Eagle1Draft,
    "frozen_kv": FrozenKvDraft,
}


def check_target(folder: str, arch: TargetArch) -> None:
    """Check from headers alone that `folder` holds every tensor of the target, with its name and shape.

    Raises:
        ConfigError: a tensor is missing, unknown or of the wrong shape; the message names it.
    """
    DecoderTarget(arch, target_checkpoint(folder, arch, dry=True), ModelContext.headers_only())


def check_draft(folder: str, spec: DraftSpec) -> None:
    """Check the draft in `folder`, all its runners, as `check_target` checks the target.

    Raises:
        ConfigError: as `check_target`.
    """
    for runner in range(spec.runners):
        DRAFTS[spec.kind](spec, draft_checkpoint(folder, spec, runner, dry=True), ModelContext.headers_only())


def draft_checkpoint(folder: str, spec: DraftSpec, runner: int = 0, dry: bool = False) -> Checkpoint:
    """Open the checkpoint of the draft in `folder`. The names that the model uses then stand for the tensors of runner
    number `runner` (a multi-layer draft has several). If `dry`, only headers are read.
    """
    return Checkpoint(folder, partial(spec.stored_name, runner=runner), spec.ignored_by(runner), dry)


def load_target(folder: str, arch: TargetArch, context: ModelContext) -> DecoderTarget:
    """Load this rank's shard of the target in `folder`. All tensors are checked by their headers before any is read.

    Raises:
        ConfigError: as `check_target`.
    """
    check_target(folder, arch)
    return DecoderTarget(arch, target_checkpoint(folder, arch), context)


def load_draft_list(
    folder: str, spec: DraftSpec, target: DecoderTarget, context: ModelContext, runners: int
) -> list[DraftModel]:
    """Load this rank's shard of the first `runners` runners of the draft in `folder`.

    A draft without an embedding or head shares the target's; see `share_embed_and_head`.

    Raises:
        ConfigError: as `check_draft`.
    """
    check_draft(folder, spec)
    drafts: list[DraftModel] = []
    for runner in range(runners):
        draft = DRAFTS[spec.kind](spec, draft_checkpoint(folder, spec, runner), context, runner)
        share_embed_and_head(draft, target, context)
        drafts.append(draft)
    return drafts


def share_embed_and_head(draft: DraftModel, target: DecoderTarget, context: ModelContext) -> None:
    """Give a draft the target's embedding or head, in the draft's own sharding, where the draft has none of its own.

    In two cases the tensors that the target has loaded are not enough, and the whole tensors are read again: the
    draft's vocabulary is not sharded like the target's, or the draft uses only some columns of a sharded head.
    """
    spec, vocab = draft.spec, context.sharding.vocab
    embed, head = target.get_embed_and_head()
    if embed.shard != vocab and not (spec.embed == "own" and spec.head != "target"):
        embed, head = read_embed_and_head(target.folder, target.arch, context)
    if spec.head == "target" and (spec.vocab_map or spec.token_map):
        full_head = head if embed.shard.size == 1 else read_embed_and_head(target.folder, target.arch, context)[1]
        head = select_head_columns(full_head, draft.target_ids, vocab, context.kernels)
    draft.set_embed_and_head(embed, head)
