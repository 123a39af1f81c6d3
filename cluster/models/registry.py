"""Which class serves which family, and the ways in: `check_target`, `load_target` and `load_draft`."""

import torch

from cluster.arch import DraftSpec, TargetArch, read_draft, read_target
from cluster.mesh import Part
from cluster.models.checkpoint import Checkpoint
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.exchange import NoExchange, TokenExchange
from cluster.models.load import Sharding
from cluster.models.target import DecoderTarget, read_embed_and_head, target_checkpoint

DRAFTS = {"LlamaForCausalLMEagle3": Eagle3Draft}


def check_target(folder: str, ranks: Part = Part()) -> TargetArch:  # noqa: B008
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
) -> Eagle3Draft:
    """This rank's part of the draft in `folder` for `target`, sharing its embedding and head where there is none.

    A whole draft beside a target whose vocabulary is sharded gets whole ones of its own, read again.

    Raises:
        ConfigError: the folder holds no draft that is served here, or one that does not fit `target`.
    """
    checkpoint = Checkpoint(folder)
    spec: DraftSpec = read_draft(folder, checkpoint.shapes, target.arch)
    draft = DRAFTS[spec.family](spec, checkpoint, dtype, device, exchange, sharding, max_position)
    embed, head = target.get_embed_and_head()
    if embed.part != sharding.vocab and not (spec.own_embed and spec.own_head):
        embed, head = read_embed_and_head(target.folder, target.arch, dtype, device)
    draft.set_embed_and_head(embed, head)
    return draft
