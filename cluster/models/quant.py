"""Dequantisation of weights: FP8 with one scale per tensor, row or 128 x 128 block, and MXFP4."""

import torch
from torch import Tensor

BLOCK = 128
GROUP = 32  # values that share one scale in MXFP4 (OCP Microscaling Formats 1.0)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def block_scaled(values: Tensor, scales: Tensor, row: int, column: int) -> Tensor:
    """FP8 `values` `[r, c]`, cut from a tensor at (`row`, `column`), times the scales of the blocks they lie in.

    `scales` `[ceil(R / 128), ceil(C / 128)]` are the whole tensor's. DeepSeek's `weight_scale_inv` is multiplied,
    despite its name.
    """
    at = torch.arange(row, row + values.shape[0], device=scales.device) // BLOCK
    to = torch.arange(column, column + values.shape[1], device=scales.device) // BLOCK
    return values.float() * scales.float().index_select(0, at).index_select(1, to)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Packed `blocks` `[.., G, 16]` of two values a byte, low half first, and `scales` `[.., G]` -> `[.., G * 32]`.

    A scale byte s stands for 2 ** (s - 127).
    """
    if blocks.device.type == "meta":
        return blocks.new_empty(*blocks.shape[:-2], blocks.shape[-2] * GROUP, dtype=torch.float32)
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).long()
    values = FP4.to(blocks.device)[pairs].flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2)
