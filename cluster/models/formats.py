"""Readers of the formats of quantised matrices. Each returns the requested part of a matrix as a `Quantised`.

Formats are recognised by names, dtypes and shapes of tensors. Shape legend: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.kernels.quantised import Kind, Quantised
from cluster.models.arithmetic import select_indices
from cluster.models.scales import group_indices, group_size, read_scales, select_inputs
from cluster.models.stored import Index, Span, StoredMatrix, StoredTensors

MX_GROUP = 32  # inputs that share a scale in MXFP4 (OCP Microscaling Formats 1.0)
FLOAT8: dict[str, Kind] = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
INTEGERS: dict[int, Kind] = {4: "int4", 8: "int8"}
INT32_OF_ONES = {4: 0x11111111, 8: 0x01010101}  # an int32 in which every packed number is 1
SCALE_SUFFIXES = ("_scale_inv", "_scale")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
EXPONENT_DTYPES = ("U8", "F8_E8M0")  # dtypes of scales that are powers of 2; both store the exponent in one byte
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_scale_ub",
    ".act_scale",
    ".activation_scale",
    ".qscale_act",
    ".input_zero_point",
)
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # output i of eight neighbours is packed number AWQ_ORDER[i] of an int32


def codes_name_of(files: StoredTensors, stored: str) -> str:
    """Return the name of the tensor that holds the matrix `stored`, or its codes if it is packed. If there is none,
    return `stored`.
    """
    stem = stored.removesuffix(".weight")
    names = (stored, f"{stored}_blocks", f"{stem}.weight_packed", f"{stem}.qweight")
    return next((name for name in names if files.has_stored(name)), stored)


def reader_of(files: StoredTensors, stored: str) -> Callable[[StoredTensors, StoredMatrix], Quantised] | None:
    """Return the function that reads the format of the matrix `stored`; None if the matrix is not quantised."""
    codes_name = codes_name_of(files, stored)
    if codes_name == stored:
        dtype = files.locate(stored).dtype
        return read_float8 if dtype in FLOAT8 else read_int8 if dtype == "I8" else None
    return (
        read_mxfp4
        if codes_name.endswith("_blocks")
        else read_qweight
        if codes_name.endswith("qweight")
        else read_compressed
    )


def read_float8(files: StoredTensors, matrix: StoredMatrix) -> Quantised:
    """Read FP8 with one scale for the whole matrix, for each output, for each group of inputs, or for each block. Codes
    are multiplied by the scales. This is also true of DeepSeek's `weight_scale_inv`, despite its name.
    """
    kind = FLOAT8[files.locate(matrix.stored, matrix.shape).dtype]
    names = [f"{matrix.stored}{suffix}" for suffix in SCALE_SUFFIXES] + [f"{matrix.stem}.qscale_weight"]
    scale_names = [name for name in names if files.has_stored(name)]
    if len(scale_names) != 1:
        raise files.error(matrix.stored, f"is FP8 and needs one scale, {names[0]!r}; has {scale_names}")
    codes = _read_codes(files, matrix).view(torch.uint8)
    scales, group = read_scales(files, matrix, _check_scales(files, matrix, scale_names[0]))
    return Quantised(kind, codes, _convert_scales(scales), None, group)


def read_int8(files: StoredTensors, matrix: StoredMatrix) -> Quantised:
    """Read the format int-quantized of compressed-tensors: int8 codes, one in each byte."""
    files.locate(matrix.stored, matrix.shape)
    codes = _to_unsigned(_read_codes(files, matrix))
    scales, group = read_scales(files, matrix, _check_scales(files, matrix, f"{matrix.stored}_scale"))
    zeros, zeros_name = None, f"{matrix.stored}_zero_point"
    if files.has_stored(zeros_name):
        zeros = _to_unsigned(read_scales(files, matrix, zeros_name)[0])
    return Quantised("int8", codes, _convert_scales(scales), zeros, group)


def read_compressed(files: StoredTensors, matrix: StoredMatrix) -> Quantised:
    """Read the format pack-quantized of compressed-tensors. An int32 packs the codes of neighbouring inputs, or the
    zero points of neighbouring outputs.
    """
    name, (outputs, inputs) = f"{matrix.stem}.weight_packed", matrix.shape
    bits = _code_bits(files, matrix, name, 1)
    files.locate(name, (outputs, -(-inputs * bits // 32)))
    declared = f"{matrix.stem}.weight_shape"
    if (
        files.has_stored(declared)
        and not (stored_shape := files.read(declared)).is_meta
        and tuple(stored_shape.tolist()) != matrix.shape
    ):
        raise files.error(declared, f"says {stored_shape.tolist()} but the config requires {list(matrix.shape)}")
    int32_slice, code_slice = _int32_slices(matrix.inputs, bits)
    codes = unpack_int32(files.read(name, (slice(*matrix.outputs), int32_slice), matrix.device), bits)[:, code_slice]
    scales_name = _check_scales(files, matrix, f"{matrix.stem}.weight_scale")
    scales, group = read_scales(files, matrix, scales_name)
    zeros, zeros_name = None, f"{matrix.stem}.weight_zero_point"
    if files.has_stored(zeros_name):
        groups = files.locate(scales_name).shape[-1]
        files.locate(zeros_name, (-(-outputs * bits // 32), groups))
        int32_slice, code_slice = _int32_slices(matrix.outputs, bits)
        zeros = unpack_int32(files.read(zeros_name, (int32_slice,), matrix.device).t(), bits)[:, code_slice].t()
        zeros = select_inputs(files, matrix, zeros, group_size(files, matrix, scales_name, groups))[0]
    return Quantised(INTEGERS[bits], codes, _convert_scales(scales), zeros, group)


def read_qweight(files: StoredTensors, matrix: StoredMatrix) -> Quantised:
    """Read GPTQ or AWQ. In GPTQ, an int32 packs the codes of neighbouring inputs, or the zero points of neighbouring
    outputs. In AWQ, an int32 packs the codes or zero points of eight neighbouring outputs, in AWQ's own order.
    """
    name, (outputs, inputs), packing = f"{matrix.stem}.qweight", matrix.shape, files.quantisation.packing
    by_outputs = inputs, -(-outputs // 8)  # shape of `qweight` in AWQ
    is_awq = packing == "awq" or (packing is None and files.locate(name).shape == by_outputs)
    bits = 4 if is_awq else _code_bits(files, matrix, name, 0)
    files.locate(name, by_outputs if is_awq else (-(-inputs * bits // 32), outputs))
    scales_name = _check_scales(files, matrix, f"{matrix.stem}.scales")
    groups = files.locate(scales_name).shape[0]
    files.locate(scales_name, (groups, outputs))
    files.locate(f"{matrix.stem}.qzeros", (groups, -(-outputs * bits // 32)))
    size = group_size(files, matrix, scales_name, groups)
    int32_slice, code_slice = _int32_slices(matrix.outputs, bits)
    zeros = files.read(f"{matrix.stem}.qzeros", (slice(None), int32_slice), matrix.device)
    if is_awq:
        codes = unpack_int32(files.read(name, (slice(*matrix.inputs), int32_slice), matrix.device), bits, True)[
            :, code_slice
        ].t()
    else:
        # Writers of GPTQ subtract an offset from whole int32 numbers, so that a borrow may cross packed zero points.
        # Adding the offset to whole int32 numbers undoes this.
        zeros = zeros + files.quantisation.zero_offset * INT32_OF_ONES[bits]
        inner_int32, inner_codes = _int32_slices(matrix.inputs, bits)
        codes = unpack_int32(files.read(name, (inner_int32, slice(*matrix.outputs)), matrix.device).t(), bits)[
            :, inner_codes
        ]
    zeros = unpack_int32(zeros, bits, is_awq)[:, code_slice]
    scales = files.read(scales_name, (slice(None), slice(*matrix.outputs)), matrix.device).t()
    scales, group = select_inputs(files, matrix, scales, size)
    return Quantised(
        INTEGERS[bits], codes, _convert_scales(scales), select_inputs(files, matrix, zeros.t(), size)[0], group
    )


def read_mxfp4(files: StoredTensors, matrix: StoredMatrix) -> Quantised:
    """Read MXFP4. The tensor `_blocks` `[.., O, G, 16]` holds two numbers per byte, the first in the low half. The
    tensor `_scales` `[.., O, G]` holds the exponent of each group's scale.
    """
    inputs = matrix.shape[-1]
    index: Index = () if matrix.expert is None else (matrix.expert,)
    if inputs % MX_GROUP:
        raise files.error(f"{matrix.stored}_blocks", f"has {inputs} inputs, not a multiple of {MX_GROUP}")
    groups, (start, stop) = inputs // MX_GROUP, matrix.inputs
    tensors, group_slice = [], slice(start // MX_GROUP, -(-stop // MX_GROUP))
    for suffix, last_dims in (("_blocks", (MX_GROUP // 2,)), ("_scales", ())):
        name = matrix.stored + suffix
        if (entry := files.locate(name, (*matrix.shape[:-1], groups, *last_dims))).dtype != "U8":
            raise files.error(name, f"is {entry.dtype}, but MXFP4 must be stored as U8")
        tensors.append(files.read(name, (*index, slice(*matrix.outputs), group_slice), matrix.device))
    first = start - group_slice.start * MX_GROUP
    codes = unpack_nibbles(tensors[0]).flatten(-2)[..., first : first + stop - start]
    scales, group = powers_of_two(tensors[1]), MX_GROUP
    # If the requested inputs cut groups, give each input a scale of its own (group size 1).
    if first or (stop % MX_GROUP and stop != inputs):
        scales, group = select_indices(scales, group_indices(first, first + stop - start, MX_GROUP, scales), -1), 1
    return Quantised("fp4", codes, scales, None, group)


def _read_codes(files: StoredTensors, matrix: StoredMatrix) -> Tensor:
    """Read the requested codes, which are stored unpacked."""
    return files.read(matrix.stored, (slice(*matrix.outputs), slice(*matrix.inputs)), matrix.device)


def _check_scales(files: StoredTensors, matrix: StoredMatrix, name: str) -> str:
    """Return `name`, after a check that the tensor may hold scales; count the matrix's activation scales as used.

    Raises:
        ConfigError: the tensor is missing, or has a dtype that scales cannot have.
    """
    for suffix in ACTIVATION_SCALES:
        files.mark_used(matrix.stem + suffix)
    if (dtype := files.locate(name).dtype) not in (*FLOAT_DTYPES, *EXPONENT_DTYPES):
        raise files.error(name, f"is {dtype}, which scales are not")
    return name


def _code_bits(files: StoredTensors, matrix: StoredMatrix, name: str, dim: int) -> int:
    """Return the bits per code of the int32 tensor `name`, which packs the codes of all inputs along `dim`.

    Raises:
        ConfigError: the shape fits neither 4 nor 8 bits, or does not fit the number of bits that the config gives.
    """
    entry, inputs, configured_bits = files.locate(name), matrix.shape[-1], files.scheme(matrix.stored).bits
    is_int32_matrix = entry.dtype == "I32" and len(entry.shape) == 2
    possible_bits = [bits for bits in INTEGERS if is_int32_matrix and entry.shape[dim] == -(-inputs * bits // 32)]
    if not possible_bits:
        raise files.error(
            name, f"is {entry.dtype} {list(entry.shape)}, which holds {inputs} inputs neither in 4 nor 8 bits"
        )
    if configured_bits is not None and configured_bits not in possible_bits:
        raise files.error(
            name,
            f"is {list(entry.shape)}, which holds {inputs} inputs in {possible_bits[0]} bits, but quantization_config "
            f"of config.json says that it has {configured_bits}",
        )
    return possible_bits[0] if configured_bits is None else configured_bits


def _int32_slices(span: Span, bits: int) -> tuple[slice, slice]:
    """Return where the codes in `span` are: the slice of int32, and the slice of the codes unpacked from that slice."""
    codes_per_int32, (start, stop) = 32 // bits, span
    first = start // codes_per_int32
    return slice(first, -(-stop // codes_per_int32)), slice(
        start - first * codes_per_int32, stop - first * codes_per_int32
    )


def _to_unsigned(signed: Tensor) -> Tensor:
    """Return int8 numbers plus 128, as uint8: to add 128 is to flip the top bit."""
    return signed.contiguous().view(torch.uint8) ^ 128


def _convert_scales(scales: Tensor) -> Tensor:
    """Convert scales to bfloat16 or float32, the dtypes that `Quantised` allows."""
    if scales.dtype == torch.uint8:
        return powers_of_two(scales)
    return scales if scales.dtype == torch.bfloat16 else scales.float()


def unpack_int32(packed: Tensor, bits: int, interleaved: bool = False) -> Tensor:
    """Unpack int32 `[n, w]` to uint8 `[n, w * 32 / bits]`. Each int32 holds numbers of `bits` bits, the first one in
    its lowest bits. If `interleaved`, undo AWQ's order.
    """
    codes = packed.contiguous().view(torch.uint8)
    codes = unpack_nibbles(codes) if bits == 4 else codes
    if not interleaved or codes.is_meta:
        return codes
    return codes.view(codes.shape[0], -1, 8)[..., AWQ_ORDER].flatten(1)


def unpack_nibbles(pairs: Tensor) -> Tensor:
    """Unpack bytes `[.., n]` of two 4-bit numbers, the low half first, to `[.., 2 n]`."""
    if pairs.is_meta:
        return pairs.new_empty(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (s - 127) for each byte s, in bfloat16, which represents it exactly."""
    if exponents.is_meta:
        return torch.empty(exponents.shape, dtype=torch.bfloat16, device="meta")
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127).to(torch.bfloat16)
