"""Readers of the formats of quantised matrices: each returns the requested slice as a `Quantised`.

Formats are recognised by names, dtypes and shapes of tensors. Shape legend: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.kernels.quantised import Kind, Quantised
from cluster.models.arithmetic import chosen
from cluster.models.scales import beside, group_size, groups_of, of_inputs
from cluster.models.stored import Files, Index, Span, StoredMatrix

MX_GROUP = 32  # inputs that share a scale in MXFP4 (OCP Microscaling Formats 1.0)
FLOAT8: dict[str, Kind] = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
INTEGERS: dict[int, Kind] = {4: "int4", 8: "int8"}
ONES = {4: 0x11111111, 8: 0x01010101}  # an int32 in which every packed number is 1
SCALES = ("_scale_inv", "_scale")
NUMBERS = ("F64", "F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")  # dtypes of scales that are powers of 2; both are the same byte
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_scale_ub",
    ".act_scale",
    ".activation_scale",
    ".qscale_act",
    ".input_zero_point",
)
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # output i of eight neighbours is packed number AWQ_PLACES[i] of an int32


def place_of(files: Files, stored: str) -> str:
    """Return the name of the tensor that holds `stored` or, if it is packed, its codes."""
    stem = stored.removesuffix(".weight")
    names = (stored, f"{stored}_blocks", f"{stem}.weight_packed", f"{stem}.qweight")
    return next((name for name in names if files.has(name)), stored)


def format_of(files: Files, stored: str) -> Callable[[Files, StoredMatrix], Quantised] | None:
    """Return the reader of the format of `stored`; None if `stored` is not quantised."""
    place = place_of(files, stored)
    if place == stored:
        dtype = files.entry(stored).dtype
        return float8 if dtype in FLOAT8 else int8 if dtype == "I8" else None
    return mxfp4 if place.endswith("_blocks") else qweight if place.endswith("qweight") else compressed


def float8(files: Files, asked: StoredMatrix) -> Quantised:
    """Read FP8 with a scale for the tensor, for each output, for each group of inputs, or for each block. Codes are
    multiplied by the scales, also by DeepSeek's `weight_scale_inv`, despite its name.
    """
    kind = FLOAT8[files.entry(asked.stored, asked.shape).dtype]
    names = [f"{asked.stored}{end}" for end in SCALES] + [f"{asked.stem}.qscale_weight"]
    found = [name for name in names if files.has(name)]
    if len(found) != 1:
        raise files.wrong(asked.stored, f"is FP8 and needs one scale, {names[0]!r}; has {found}")
    codes = _part(files, asked).view(torch.uint8)
    scales, group = beside(files, asked, _scales(files, asked, found[0]))
    return Quantised(kind, codes, _of_scales(scales), None, group)


def int8(files: Files, asked: StoredMatrix) -> Quantised:
    """Read compressed-tensors' int-quantized: int8 codes, one to a byte."""
    files.entry(asked.stored, asked.shape)
    codes = _from_zero(_part(files, asked))
    scales, group = beside(files, asked, _scales(files, asked, f"{asked.stored}_scale"))
    zeros, stored = None, f"{asked.stored}_zero_point"
    if files.has(stored):
        zeros = _from_zero(beside(files, asked, stored)[0])
    return Quantised("int8", codes, _of_scales(scales), zeros, group)


def compressed(files: Files, asked: StoredMatrix) -> Quantised:
    """Read compressed-tensors' pack-quantized: an int32 packs codes of neighbouring inputs, or zeros of outputs."""
    name, (outputs, inputs) = f"{asked.stem}.weight_packed", asked.shape
    bits = _bits(files, asked, name, 1)
    files.entry(name, (outputs, -(-inputs * bits // 32)))
    declared = f"{asked.stem}.weight_shape"
    if files.has(declared) and not (held := files.read(declared)).is_meta and tuple(held.tolist()) != asked.shape:
        raise files.wrong(declared, f"says {held.tolist()} but the config requires {list(asked.shape)}")
    words, cut = _words(asked.inputs, bits)
    codes = unpacked(files.read(name, (slice(*asked.outputs), words), asked.device), bits)[:, cut]
    scaled = _scales(files, asked, f"{asked.stem}.weight_scale")
    scales, group = beside(files, asked, scaled)
    zeros, stored = None, f"{asked.stem}.weight_zero_point"
    if files.has(stored):
        groups = files.entry(scaled).shape[-1]
        files.entry(stored, (-(-outputs * bits // 32), groups))
        words, cut = _words(asked.outputs, bits)
        zeros = unpacked(files.read(stored, (words,), asked.device).t(), bits)[:, cut].t()
        zeros = of_inputs(files, asked, zeros, group_size(files, asked, scaled, groups))[0]
    return Quantised(INTEGERS[bits], codes, _of_scales(scales), zeros, group)


def qweight(files: Files, asked: StoredMatrix) -> Quantised:
    """Read GPTQ or AWQ. In GPTQ, an int32 packs codes of neighbouring inputs, and zeros of neighbouring outputs. In
    AWQ, an int32 packs codes or zeros of eight neighbouring outputs, in AWQ's own order.
    """
    name, (outputs, inputs), packing = f"{asked.stem}.qweight", asked.shape, files.quantisation.packing
    by_outputs = inputs, -(-outputs // 8)  # shape of `qweight` in AWQ
    awq = packing == "awq" or (packing is None and files.entry(name).shape == by_outputs)
    bits = 4 if awq else _bits(files, asked, name, 0)
    files.entry(name, by_outputs if awq else (-(-inputs * bits // 32), outputs))
    scaled = _scales(files, asked, f"{asked.stem}.scales")
    groups = files.entry(scaled).shape[0]
    files.entry(scaled, (groups, outputs))
    files.entry(f"{asked.stem}.qzeros", (groups, -(-outputs * bits // 32)))
    each = group_size(files, asked, scaled, groups)
    words, cut = _words(asked.outputs, bits)
    zeros = files.read(f"{asked.stem}.qzeros", (slice(None), words), asked.device)
    if awq:
        codes = unpacked(files.read(name, (slice(*asked.inputs), words), asked.device), bits, True)[:, cut].t()
    else:  # GPTQ subtracts its offset from whole int32, with borrows across packed zeros, so add it to whole int32 too
        zeros = zeros + files.quantisation.zero_offset * ONES[bits]
        inner, within = _words(asked.inputs, bits)
        codes = unpacked(files.read(name, (inner, slice(*asked.outputs)), asked.device).t(), bits)[:, within]
    zeros = unpacked(zeros, bits, awq)[:, cut]
    scales = files.read(scaled, (slice(None), slice(*asked.outputs)), asked.device).t()
    scales, group = of_inputs(files, asked, scales, each)
    return Quantised(INTEGERS[bits], codes, _of_scales(scales), of_inputs(files, asked, zeros.t(), each)[0], group)


def mxfp4(files: Files, asked: StoredMatrix) -> Quantised:
    """Read MXFP4: `_blocks` `[.., O, G, 16]`, two numbers a byte, low half first; `_scales` `[.., O, G]`, exponents."""
    inputs = asked.shape[-1]
    index: Index = () if asked.expert is None else (asked.expert,)
    if inputs % MX_GROUP:
        raise files.wrong(f"{asked.stored}_blocks", f"has {inputs} inputs, not a multiple of {MX_GROUP}")
    groups, (start, stop) = inputs // MX_GROUP, asked.inputs
    parts, lying = [], slice(start // MX_GROUP, -(-stop // MX_GROUP))
    for end, tail in (("_blocks", (MX_GROUP // 2,)), ("_scales", ())):
        name = asked.stored + end
        if (entry := files.entry(name, (*asked.shape[:-1], groups, *tail))).dtype != "U8":
            raise files.wrong(name, f"is {entry.dtype}, but MXFP4 must be stored as U8")
        parts.append(files.read(name, (*index, slice(*asked.outputs), lying), asked.device))
    first = start - lying.start * MX_GROUP
    codes = halves(parts[0]).flatten(-2)[..., first : first + stop - start]
    scales, group = powers(parts[1]), MX_GROUP
    # If the slice cuts groups, give each input a scale of its own (group 1).
    if first or (stop % MX_GROUP and stop != inputs):
        scales, group = chosen(scales, groups_of(first, first + stop - start, MX_GROUP, scales), -1), 1
    return Quantised("fp4", codes, scales, None, group)


def _part(files: Files, asked: StoredMatrix) -> Tensor:
    """Read the requested codes, which are stored unpacked."""
    return files.read(asked.stored, (slice(*asked.outputs), slice(*asked.inputs)), asked.device)


def _scales(files: Files, asked: StoredMatrix, name: str) -> str:
    """Return `name`, after a check that the tensor may hold scales; count the matrix's activation scales as used.

    Raises:
        ConfigError: the tensor is missing, or has a dtype that scales cannot have.
    """
    for end in ACTIVATION_SCALES:
        files.skip(asked.stem + end)
    if (dtype := files.entry(name).dtype) not in (*NUMBERS, *EXPONENTS):
        raise files.wrong(name, f"is {dtype}, which scales are not")
    return name


def _bits(files: Files, asked: StoredMatrix, name: str, dim: int) -> int:
    """Return the bits per code of the int32 tensor `name`, which packs the codes of all inputs along `dim`.

    Raises:
        ConfigError: the shape fits neither 4 nor 8 bits, or does not fit the number of bits that the config gives.
    """
    entry, inputs, said = files.entry(name), asked.shape[-1], files.scheme(asked.stored).bits
    whole = entry.dtype == "I32" and len(entry.shape) == 2
    found = [bits for bits in INTEGERS if whole and entry.shape[dim] == -(-inputs * bits // 32)]
    if not found:
        raise files.wrong(
            name, f"is {entry.dtype} {list(entry.shape)}, which holds {inputs} inputs neither in 4 nor 8 bits"
        )
    if said is not None and said not in found:
        raise files.wrong(
            name,
            f"is {list(entry.shape)}, which holds {inputs} inputs in {found[0]} bits, but quantization_config of "
            f"config.json says that it has {said}",
        )
    return found[0] if said is None else said


def _words(span: Span, bits: int) -> tuple[slice, slice]:
    """Return where the codes in `span` are: the slice of int32, and the slice of the codes unpacked from that slice."""
    each, (start, stop) = 32 // bits, span
    first = start // each
    return slice(first, -(-stop // each)), slice(start - first * each, stop - first * each)


def _from_zero(signed: Tensor) -> Tensor:
    """Return int8 plus 128 as uint8; flipping the top bit adds 128."""
    return signed.contiguous().view(torch.uint8) ^ 128


def _of_scales(given: Tensor) -> Tensor:
    """Convert scales to bfloat16 or float32, the dtypes that `Quantised` allows."""
    if given.dtype == torch.uint8:
        return powers(given)
    return given if given.dtype == torch.bfloat16 else given.float()


def unpacked(words: Tensor, bits: int, interleaved: bool = False) -> Tensor:
    """Unpack int32 `[n, w]` of numbers of `bits` bits, the first in the lowest bits, to uint8 `[n, w * 32 / bits]`.
    If `interleaved`, undo AWQ's order.
    """
    found = words.contiguous().view(torch.uint8)
    found = halves(found) if bits == 4 else found
    if not interleaved or found.is_meta:
        return found
    return found.view(found.shape[0], -1, 8)[..., AWQ_PLACES].flatten(1)


def halves(pairs: Tensor) -> Tensor:
    """Unpack bytes `[.., n]` of two 4-bit numbers, the low half first, to `[.., 2 n]`."""
    if pairs.is_meta:
        return pairs.new_empty(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def powers(exponents: Tensor) -> Tensor:
    """Return 2 ** (s - 127) for each byte s, in bfloat16, which represents it exactly."""
    if exponents.is_meta:
        return torch.empty(exponents.shape, dtype=torch.bfloat16, device="meta")
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127).to(torch.bfloat16)
