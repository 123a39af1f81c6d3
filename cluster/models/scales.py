"""Finds out which numbers of a quantised matrix share a scale. The config and the tensor `g_idx` say it; if the config
does not, the shapes of tensors do.

If tensors and config disagree, the checkpoint is refused. Shape legend: O outputs, I inputs, G groups of inputs.
"""

import torch
from torch import Tensor

from cluster.models.arithmetic import select_indices
from cluster.models.stored import StoredMatrix, StoredTensors

DEFAULT_BLOCK = 128  # outputs and inputs per block of FP8 if the config gives no `weight_block_size`
COMMON_GROUP_SIZES = (
    16,
    32,
    64,
    128,
    256,
    512,
    1024,
)  # group sizes to try if the config gives none and the last group is partial


def read_scales(files: StoredTensors, matrix: StoredMatrix, name: str) -> tuple[Tensor, int]:
    """Read the scales (or zero points) stored as `name`, for the part of the matrix that `matrix` selects, as `[O, G]`.
    Also return how many inputs share one scale (or zero point).

    On disk there is one scale for the whole matrix, one for each output, G for each output, or one for each block of
    outputs and inputs.

    Raises:
        ConfigError: the number of scales does not agree with the config, or with the shape of the matrix.
    """
    (outputs, inputs), (start, stop) = matrix.shape, matrix.outputs
    scales = files.read(name, (), matrix.device)
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
    elif scales.shape == (outputs,):
        scales = scales[:, None]
    elif scales.dim() == 4 and scales.shape[1] == scales.shape[3] == 1:  # ModelOpt's FP8_PB_WO
        scales = scales[:, 0, :, 0]
    if scales.dim() != 2:
        raise files.error(name, f"is {list(scales.shape)}, but scales of {matrix.stored!r} have two dimensions at most")
    block_outputs, block_inputs = _scale_block(files, matrix, name, (scales.shape[0], scales.shape[1]))
    if scales.shape[0] == 1:
        scales = scales.expand(stop - start, -1)
    elif block_outputs == 1:
        scales = scales[start:stop]
    else:
        scales = select_indices(scales, group_indices(start, stop, block_outputs, scales), 0)
    return select_inputs(files, matrix, scales, block_inputs or inputs)


def group_size(files: StoredTensors, matrix: StoredMatrix, name: str, groups: int) -> int:
    """Return how many inputs share a scale of `name`, which has `groups` scales for each output.

    Raises:
        ConfigError: as `read_scales`.
    """
    outputs, inputs = matrix.shape
    return _scale_block(files, matrix, name, (outputs, groups))[1] or inputs


def _scale_block(files: StoredTensors, matrix: StoredMatrix, name: str, counts: tuple[int, int]) -> tuple[int, int]:
    """Return how many neighbouring outputs and inputs share a scale of `name`, as in `Scheme.block` (0: all of them).

    `counts` are the numbers of scales along outputs and inputs. Raises `ConfigError` as `read_scales` does.
    """
    (outputs, inputs), scheme = matrix.shape, files.scheme(matrix.stored)
    if scheme.block is not None:
        expected = tuple(
            _num_blocks(size, block_size) for size, block_size in zip(matrix.shape, scheme.block, strict=True)
        )
        if counts == expected:
            return scheme.block
        if scheme.block[0] == 1 and counts[0] == outputs:
            problem = f"has {counts[1]} groups of {inputs} inputs, and {scheme.config_quote}, which makes {expected[1]}"
        else:
            problem = (
                f"is {list(counts)} but {matrix.stored!r} of {list(matrix.shape)} needs {list(expected)}, as "
                f"{scheme.config_quote}"
            )
        raise files.error(name, f"{problem}; config.json and the tensors must agree")
    block_counts = (_num_blocks(outputs, DEFAULT_BLOCK), _num_blocks(inputs, DEFAULT_BLOCK))
    if counts == (1, 1):
        return 0, 0
    if counts == block_counts and outputs != block_counts[0]:
        return DEFAULT_BLOCK, DEFAULT_BLOCK
    sizes = _group_sizes(inputs, counts[1])
    if counts[0] != outputs or not sizes:
        raise files.error(
            name,
            f"is {list(counts)} but {matrix.stored!r} of {list(matrix.shape)} needs {list(block_counts)}, one per "
            f"block of {DEFAULT_BLOCK} x {DEFAULT_BLOCK}, or some for each of its outputs",
        )
    if len(sizes) > 1:
        size_choices = " or ".join(map(str, sizes))
        raise files.error(
            name,
            f"has {counts[1]} groups of {inputs} inputs, which may be of {size_choices}; quantization_config in "
            "config.json must say group_size (or weight_block_size)",
        )
    return 1, sizes[0]


def _group_sizes(inputs: int, groups: int) -> list[int]:
    """Return the sizes that a group may have if `inputs` inputs form `groups` groups. There can be several sizes
    because the last group may be partial.
    """
    if groups == 1:
        return [inputs]
    exact_sizes = {inputs // groups} if inputs % groups == 0 else set()
    return sorted(exact_sizes | {size for size in COMMON_GROUP_SIZES if _num_blocks(inputs, size) == groups})


def _num_blocks(size: int, block_size: int) -> int:
    """Return how many blocks of `block_size` cover `size`; 1 if `block_size` is 0, which stands for one block."""
    return -(-size // block_size) if block_size else 1


def select_inputs(files: StoredTensors, matrix: StoredMatrix, values: Tensor, size: int) -> tuple[Tensor, int]:
    """Return the scales (or zeros) of the requested inputs, out of the `values` `[O, G]` of all inputs. Also return how
    many inputs share a scale.

    A group has `size` inputs; the last group may have fewer. If the requested inputs are not whole groups of
    neighbours, each input gets a scale of its own, and the number returned is 1.
    """
    inputs, groups, (start, stop) = matrix.shape[-1], values.shape[1], matrix.inputs
    input_groups = _stored_group_index(files, matrix, size, groups)
    if groups == 1:
        return values, stop - start
    if input_groups is None and start % size == 0 and (stop % size == 0 or stop == inputs):
        return values[:, start // size : -(-stop // size)], size
    input_groups = group_indices(0, inputs, size, values) if input_groups is None else input_groups
    return select_indices(values, input_groups[start:stop], 1), 1


def group_indices(start: int, stop: int, size: int, scales: Tensor) -> Tensor:
    """Return the group index of each of the inputs (or outputs) `start` to `stop - 1`, int64 `[stop - start]`. A group
    is `size` neighbours. The result is on the device of `scales`, so that it can index them (for scales on the meta
    device, on the CPU).
    """
    device = "cpu" if scales.is_meta else scales.device  # arithmetic on the meta device is slow
    return torch.arange(start, stop, device=device) // size


def _stored_group_index(files: StoredTensors, matrix: StoredMatrix, size: int, groups: int) -> Tensor | None:
    """Return the group of each input as `g_idx` gives it, `[I]`. Return None if each group is `size` neighbouring
    inputs, which is so without a `g_idx`, too.

    Raises:
        ConfigError: `g_idx` names a group without scales, or puts more than `size` inputs into one group.
    """
    stem, inputs = matrix.stem, matrix.shape[-1]
    for name, expected_by_config in ((f"{stem}.weight_g_idx", True), (f"{stem}.g_idx", files.quantisation.desc_act)):
        if not files.has_stored(name):
            continue
        files.locate(name, (inputs,))
        group_index = files.read(name)
        if group_index.is_meta:  # only headers are read, so the config decides
            return group_index if expected_by_config else None
        group_index = group_index.long()
        if group_index.min() < 0 or not group_index.any():  # left blank by the writer
            return None
        if torch.equal(group_index, torch.arange(inputs, device=group_index.device) // size):
            return None
        sizes = group_index.bincount(minlength=groups)
        if len(sizes) > groups:
            raise files.error(name, f"names group {len(sizes) - 1}, but there are scales of {groups} groups")
        if (largest_group := int(sizes.max())) > size:
            rule = files.scheme(matrix.stored).config_quote or f"{groups} groups of {inputs} inputs have at most {size}"
            raise files.error(name, f"puts {largest_group} inputs into one group, and {rule}")
        return group_index
    return None
