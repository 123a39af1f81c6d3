"""Finds out which numbers of a quantised matrix share a scale: from the config and `g_idx`, or, if the config does not
say it, from the shapes of tensors.

If tensors and config disagree, the checkpoint is refused. Shape legend: O outputs, I inputs, G groups of inputs.
"""

import torch
from torch import Tensor

from cluster.models.arithmetic import chosen
from cluster.models.stored import Files, StoredMatrix

BLOCK = 128  # outputs and inputs per block of FP8 if the config gives no `weight_block_size`
USUAL = (16, 32, 64, 128, 256, 512, 1024)  # group sizes to try if the config gives none and the last group is partial


def beside(files: Files, asked: StoredMatrix, name: str) -> tuple[Tensor, int]:
    """Return scales or zeros `name` of the requested part as `[O, G]`, and how many inputs share one of them.

    On disk there is one scale for the tensor, one for each output, G for each output, or one for each block.

    Raises:
        ConfigError: the number of scales does not agree with the config, or with the shape of the matrix.
    """
    (outputs, inputs), (start, stop) = asked.shape, asked.outputs
    held = files.read(name, (), asked.device)
    if held.numel() == 1:
        held = held.reshape(1, 1)
    elif held.shape == (outputs,):
        held = held[:, None]
    elif held.dim() == 4 and held.shape[1] == held.shape[3] == 1:  # ModelOpt's FP8_PB_WO
        held = held[:, 0, :, 0]
    if held.dim() != 2:
        raise files.wrong(name, f"is {list(held.shape)}, but scales of {asked.stored!r} have two dimensions at most")
    tall, wide = _block_of(files, asked, name, (held.shape[0], held.shape[1]))
    if held.shape[0] == 1:
        held = held.expand(stop - start, -1)
    elif tall == 1:
        held = held[start:stop]
    else:
        held = chosen(held, groups_of(start, stop, tall, held), 0)
    return of_inputs(files, asked, held, wide or inputs)


def group_size(files: Files, asked: StoredMatrix, name: str, groups: int) -> int:
    """Return how many inputs share a scale of `name`, which has `groups` scales for each output.

    Raises:
        ConfigError: as `beside`.
    """
    outputs, inputs = asked.shape
    return _block_of(files, asked, name, (outputs, groups))[1] or inputs


def _block_of(files: Files, asked: StoredMatrix, name: str, counts: tuple[int, int]) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale of `name`, as in `Scheme.block` (0: all).

    `counts` are the numbers of scales along outputs and inputs. Raises `ConfigError` as `beside`.
    """
    (outputs, inputs), scheme = asked.shape, files.scheme(asked.stored)
    if scheme.block is not None:
        wanted = tuple(_parts(size, of) for size, of in zip(asked.shape, scheme.block, strict=True))
        if counts == wanted:
            return scheme.block
        if scheme.block[0] == 1 and counts[0] == outputs:
            problem = f"has {counts[1]} groups of {inputs} inputs, and {scheme.said}, which makes {wanted[1]}"
        else:
            problem = (
                f"is {list(counts)} but {asked.stored!r} of {list(asked.shape)} needs {list(wanted)}, as {scheme.said}"
            )
        raise files.wrong(name, f"{problem}; config.json and the tensors must agree")
    blocks = (_parts(outputs, BLOCK), _parts(inputs, BLOCK))
    if counts == (1, 1):
        return 0, 0
    if counts == blocks and outputs != blocks[0]:
        return BLOCK, BLOCK
    sizes = _group_sizes(inputs, counts[1])
    if counts[0] != outputs or not sizes:
        raise files.wrong(
            name,
            f"is {list(counts)} but {asked.stored!r} of {list(asked.shape)} needs {list(blocks)}, one per block of "
            f"{BLOCK} x {BLOCK}, or some for each of its outputs",
        )
    if len(sizes) > 1:
        either = " or ".join(map(str, sizes))
        raise files.wrong(
            name,
            f"has {counts[1]} groups of {inputs} inputs, which may be of {either}; quantization_config in config.json "
            "must say group_size (or weight_block_size)",
        )
    return 1, sizes[0]


def _group_sizes(inputs: int, groups: int) -> list[int]:
    """Return the possible sizes of `groups` groups of `inputs` inputs; several only if the last may be partial."""
    if groups == 1:
        return [inputs]
    even = {inputs // groups} if inputs % groups == 0 else set()
    return sorted(even | {size for size in USUAL if _parts(inputs, size) == groups})


def _parts(size: int, each: int) -> int:
    """Return ceil(size / each), the number of parts of `each`; 1 if `each` is 0."""
    return -(-size // each) if each else 1


def of_inputs(files: Files, asked: StoredMatrix, given: Tensor, each: int) -> tuple[Tensor, int]:
    """Cut scales or zeros `[O, G]` of all inputs to the requested inputs; return these, and how many inputs share one.

    A group has `each` inputs, the last one perhaps fewer. If the requested inputs are not whole groups of neighbours,
    each input gets an entry of its own, and the group size is 1.
    """
    inputs, groups, (start, stop) = asked.shape[-1], given.shape[1], asked.inputs
    own = _given_order(files, asked, each, groups)
    if groups == 1:
        return given, stop - start
    if own is None and start % each == 0 and (stop % each == 0 or stop == inputs):
        return given[:, start // each : -(-stop // each)], each
    own = groups_of(0, inputs, each, given) if own is None else own
    return chosen(given, own[start:stop], 1), 1


def groups_of(start: int, stop: int, each: int, given: Tensor) -> Tensor:
    """Return the group (of `each` neighbours) of numbers `start` to `stop - 1`, as an index into `given`."""
    device = "cpu" if given.is_meta else given.device  # arithmetic on the meta device is slow
    return torch.arange(start, stop, device=device) // each


def _given_order(files: Files, asked: StoredMatrix, each: int, groups: int) -> Tensor | None:
    """Return the group of each input as `g_idx` gives it, `[I]`; None if each group is `each` neighbouring inputs.

    Raises:
        ConfigError: `g_idx` names a group without scales, or puts more than `each` inputs into one group.
    """
    stem, inputs = asked.stem, asked.shape[-1]
    for name, likely in ((f"{stem}.weight_g_idx", True), (f"{stem}.g_idx", files.quantisation.by_activation)):
        if not files.has(name):
            continue
        files.entry(name, (inputs,))
        held = files.read(name)
        if held.is_meta:  # only headers are read, so the config decides
            return held if likely else None
        held = held.long()
        if held.min() < 0 or not held.any():  # left blank by the writer
            return None
        if torch.equal(held, torch.arange(inputs, device=held.device) // each):
            return None
        sizes = held.bincount(minlength=groups)
        if len(sizes) > groups:
            raise files.wrong(name, f"names group {len(sizes) - 1}, but there are scales of {groups} groups")
        if (most := int(sizes.max())) > each:
            said = files.scheme(asked.stored).said or f"{groups} groups of {inputs} inputs have at most {each}"
            raise files.wrong(name, f"puts {most} inputs into one group, and {said}")
        return held
    return None
