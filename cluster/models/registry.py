"""Which class serves which family, and the ways in: `check_target`, `load_target` and `load_draft`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from cluster.arch import DraftSpec, TargetArch, read_draft, read_target
from cluster.arch.draft import Kind
from cluster.config import ConfigError
from cluster.mesh import Part
from cluster.models.checkpoint import Checkpoint
from cluster.models.draft import Draft
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.exchange import NoExchange, TokenExchange
from cluster.models.joined import JoinedDraft
from cluster.models.load import Sharding
from cluster.models.target import DecoderTarget, read_embed_and_head, target_checkpoint
from cluster.models.vocab import ALL, chosen_head

DRAFTS: dict[Kind, type[Eagle3Draft] | type[JoinedDraft]] = {
    "eagle3": Eagle3Draft,
    "eagle1": JoinedDraft,
    "mistral": JoinedDraft,
    "mtp": JoinedDraft,
}


def check_target(folder: str, ranks: Part = ALL) -> TargetArch:
    """The target in `folder`, after every one of its tensors was found under its name, with its shape; reads headers.

    `ranks` is the part of an attention group that has to be able to hold its heads.

    Raises:
        ConfigError: no target that is served here, or a tensor missing, unknown or of the wrong shape, named.
    """
    arch = read_target(folder)
    sharding = Sharding(ranks, ranks, ranks)
    meta = torch.device("meta")
    DecoderTarget(arch, target_checkpoint(folder, arch, dry=True), torch.float32, meta, NoExchange(), sharding, 1)
    return arch


def check_draft(
    folder: str,
    target: TargetArch,
    ranks: Part = ALL,
    overrides: Mapping[str, Any] | None = None,
    token_map: str | None = None,
) -> DraftSpec:
    """The draft in `folder` for `target`, after every one of its tensors was found with its shape; reads headers.

    Raises:
        ConfigError: no draft that is served here, or a tensor missing, unknown or of the wrong shape, named.
    """
    spec = read_draft(folder, Checkpoint(folder).shapes, target, overrides, token_map)
    sharding = Sharding(ranks, ranks, ranks)
    meta = torch.device("meta")
    for runner in range(spec.runners):
        checkpoint = draft_checkpoint(folder, spec, runner, dry=True)
        DRAFTS[spec.kind](spec, checkpoint, torch.float32, meta, NoExchange(), sharding, 1)
    return spec


def draft_checkpoint(folder: str, spec: DraftSpec, runner: int = 0, dry: bool = False) -> Checkpoint:
    """The tensors of one runner of the draft in `folder`."""
    return Checkpoint(folder, partial(spec.stored_name, runner=runner), spec.ignored(runner), dry)


def load_target(
    folder: str,
    dtype: torch.dtype,
    device: torch.device,
    exchange: TokenExchange,
    sharding: Sharding,
    max_position: int,
) -> DecoderTarget:
    """This rank's part of the target in `folder`, every tensor accounted for before the first one is read.

    Raises:
        ConfigError: as `check_target`.
    """
    arch = check_target(folder)
    return DecoderTarget(arch, target_checkpoint(folder, arch), dtype, device, exchange, sharding, max_position)


def load_draft(
    folder: str,
    target: DecoderTarget,
    dtype: torch.dtype,
    device: torch.device,
    exchange: TokenExchange,
    sharding: Sharding,
    max_position: int,
    overrides: Mapping[str, Any] | None = None,
    runner: int = 0,
    token_map: str | None = None,
) -> Draft:
    """This rank's part of the draft in `folder` for `target`, sharing its embedding and head where there is none.

    A whole draft beside a target whose vocabulary is sharded gets whole ones of its own, read again; so does a draft
    that ranks some of the target's ids with the target's head. `overrides` and `token_map` as in `read_draft`;
    `runner` is the place in the draft runner list.

    Raises:
        ConfigError: the folder holds no draft that is served here, or one that does not fit `target`.
    """
    spec = check_draft(folder, target.arch, overrides=overrides, token_map=token_map)
    checkpoint = draft_checkpoint(folder, spec, runner)
    draft = DRAFTS[spec.kind](spec, checkpoint, dtype, device, exchange, sharding, max_position)
    draft.first_position = runner
    embed, head = target.get_embed_and_head()
    if embed.part != sharding.vocab and not (spec.embed == "own" and spec.head != "target"):
        embed, head = read_embed_and_head(target.folder, target.arch, dtype, device)
    if spec.head == "target" and (spec.vocab_map or spec.token_map):
        whole = head if embed.part.size == 1 else read_embed_and_head(target.folder, target.arch, dtype, device)[1]
        head = chosen_head(whole, draft.target_ids, sharding.vocab)
    draft.set_embed_and_head(embed, head)
    return draft


def load_draft_list(
    folder: str,
    target: DecoderTarget,
    dtype: torch.dtype,
    device: torch.device,
    exchange: TokenExchange,
    sharding: Sharding,
    max_position: int,
    overrides: Mapping[str, Any],
    num_steps: int,
    token_map: str | None = None,
) -> list[Draft]:
    """The draft runner list of `num_steps` levels: one model, or one per level where the draft has several.

    Raises:
        ConfigError: as `load_draft`, or the draft has several runners but fewer than levels.
    """
    given = (folder, target, dtype, device, exchange, sharding, max_position, overrides)
    first = load_draft(*given, token_map=token_map)
    runners = first.spec.runners
    if 1 < runners < num_steps:
        raise ConfigError(
            f"speculative_num_steps {num_steps} is more than the {runners} MTP layers of {folder!r}, each of which "
            f"makes one level; lower it to {runners}"
        )
    return [first, *(load_draft(*given, runner, token_map) for runner in range(1, min(runners, num_steps)))]
