"""How quantised tensors lie in checkpoints: each format becomes a `Quantised`, of the slice that is asked for.

What tells the formats apart is which tensors there are, and their dtypes and shapes. Shape legend: O outputs, I inputs,
G groups of inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cluster.arch.quantisation import Quantisation
from cluster.arch.safetensors.header import Stored
from cluster.config import ConfigError
from cluster.kernels.quantised import Kind, Quantised
from cluster.models.arithmetic import chosen

Span = tuple[int, int]
Index = tuple[slice | int, ...]
BLOCK = 128  # outputs and inputs that share a scale in FP8's blocks
MX_GROUP = 32  # inputs that share one in MXFP4 (OCP Microscaling Formats 1.0)
FLOAT8: dict[str, Kind] = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
INTEGERS: dict[int, Kind] = {4: "int4", 8: "int8"}
ONES = {4: 0x11111111, 8: 0x01010101}  # an int32 of them
SCALES = ("_scale_inv", "_scale")
NUMBERS = ("F64", "F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")  # dtypes of scales that are powers of 2: that of U8 is the same byte
ACTIVATION_SCALES = (
    ".input_scale",
    ".input_scale_ub",
    ".act_scale",
    ".activation_scale",
    ".qscale_act",
    ".input_zero_point",
)
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where AWQ keeps eight neighbouring outputs in an int32


class Files(Protocol):
    """What a format asks of a checkpoint; names are those on disk."""

    quantisation: Quantisation

    def entry(self, stored: str, shape: tuple[int, ...] | None = None) -> Stored:
        """Where it lies, counted as used; refused if it is missing or of another shape."""
        ...

    def has(self, stored: str) -> bool:
        """Whether it is there."""
        ...

    def read(self, stored: str, index: Index = (), device: torch.device | None = None) -> Tensor:
        """What `index` selects of it, on `device`, else on the CPU; counted as used."""
        ...

    def skip(self, stored: str) -> None:
        """Count it as used if it is there."""
        ...

    def wrong(self, stored: str, problem: str) -> ConfigError:
        """That there is a `problem` with it."""
        ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A part of the matrix `stored` `[.., O, I]` of `shape`: its outputs in `rows`, its inputs in `columns`; what it is
    made of goes to the `device` as it is stored, and is unpacked there. None: the CPU.
    """

    stored: str
    shape: tuple[int, ...]
    rows: Span | None = None
    columns: Span | None = None
    expert: int | None = None
    device: torch.device | None = None

    @property
    def stem(self) -> str:
        """What its tensors have in common."""
        return self.stored.removesuffix(".weight")

    @property
    def outputs(self) -> Span:
        """The outputs asked for."""
        return (0, self.shape[-2]) if self.rows is None else self.rows

    @property
    def inputs(self) -> Span:
        """The inputs asked for."""
        return (0, self.shape[-1]) if self.columns is None else self.columns


def place_of(files: Files, stored: str) -> str:
    """The tensor that holds `stored`, or its codes."""
    stem = stored.removesuffix(".weight")
    names = (stored, f"{stored}_blocks", f"{stem}.weight_packed", f"{stem}.qweight")
    return next((name for name in names if files.has(name)), stored)


def format_of(files: Files, stored: str) -> Callable[[Files, Asked], Quantised] | None:
    """What reads `stored`; None: it is no quantised tensor."""
    place = place_of(files, stored)
    if place == stored:
        dtype = files.entry(stored).dtype
        return float8 if dtype in FLOAT8 else int8 if dtype == "I8" else None
    return mxfp4 if place.endswith("_blocks") else qweight if place.endswith("qweight") else compressed


def float8(files: Files, asked: Asked) -> Quantised:
    """FP8 with a scale for the tensor, for each output, or for each block of 128 x 128; DeepSeek's `weight_scale_inv`
    is multiplied, despite its name.
    """
    kind = FLOAT8[files.entry(asked.stored, asked.shape).dtype]
    names = [f"{asked.stored}{end}" for end in SCALES] + [f"{asked.stem}.qscale_weight"]
    found = [name for name in names if files.has(name)]
    if len(found) != 1:
        raise files.wrong(asked.stored, f"is FP8 and needs one scale, {names[0]!r}; has {found}")
    codes = _part(files, asked).view(torch.uint8)
    scales, group = _beside(files, asked, _scales(files, asked, found[0]))
    return Quantised(kind, codes, _of_scales(scales), None, group)


def int8(files: Files, asked: Asked) -> Quantised:
    """compressed-tensors' int-quantized."""
    files.entry(asked.stored, asked.shape)
    codes = _from_zero(_part(files, asked))
    scales, group = _beside(files, asked, _scales(files, asked, f"{asked.stored}_scale"))
    zeros, stored = None, f"{asked.stored}_zero_point"
    if files.has(stored):
        zeros = _from_zero(_beside(files, asked, stored)[0])
    return Quantised("int8", codes, _of_scales(scales), zeros, group)


def compressed(files: Files, asked: Asked) -> Quantised:
    """compressed-tensors' pack-quantized: neighbouring inputs in an int32, and neighbouring outputs' zeros."""
    name, (outputs, inputs) = f"{asked.stem}.weight_packed", asked.shape
    bits = _bits(files, name, inputs, 1)
    files.entry(name, (outputs, -(-inputs * bits // 32)))
    declared = f"{asked.stem}.weight_shape"
    if files.has(declared) and not (held := files.read(declared)).is_meta and tuple(held.tolist()) != asked.shape:
        raise files.wrong(declared, f"says {held.tolist()} but the config requires {list(asked.shape)}")
    words, cut = _words(asked.inputs, bits)
    codes = unpacked(files.read(name, (slice(*asked.outputs), words), asked.device), bits)[:, cut]
    scales, group = _beside(files, asked, _scales(files, asked, f"{asked.stem}.weight_scale"))
    zeros, stored = None, f"{asked.stem}.weight_zero_point"
    if files.has(stored):
        groups = files.entry(f"{asked.stem}.weight_scale").shape[-1]
        files.entry(stored, (-(-outputs * bits // 32), groups))
        words, cut = _words(asked.outputs, bits)
        zeros = _of_inputs(files, asked, unpacked(files.read(stored, (words,), asked.device).t(), bits)[:, cut].t())[0]
    return Quantised(INTEGERS[bits], codes, _of_scales(scales), zeros, group)


def qweight(files: Files, asked: Asked) -> Quantised:
    """GPTQ, neighbouring inputs in an int32, or AWQ, eight outputs in an order of its own; zeros by outputs in both."""
    name, (outputs, inputs) = f"{asked.stem}.qweight", asked.shape
    awq = files.entry(name).shape == (inputs, outputs // 8)
    bits = 4 if awq else _bits(files, name, inputs, 0)
    if not awq:
        files.entry(name, (inputs * bits // 32, outputs))
    groups = files.entry(f"{asked.stem}.scales").shape[0]
    files.entry(f"{asked.stem}.scales", (groups, outputs))
    files.entry(f"{asked.stem}.qzeros", (groups, outputs * bits // 32))
    if inputs % groups or files.quantisation.group not in (None, inputs // groups):
        said = files.quantisation.group
        raise files.wrong(f"{asked.stem}.scales", f"has {groups} groups of {inputs} inputs, and group_size is {said}")
    words, cut = _words(asked.outputs, bits)
    zeros = files.read(f"{asked.stem}.qzeros", (slice(None), words), asked.device)
    if awq:
        codes = unpacked(files.read(name, (slice(*asked.inputs), words), asked.device), bits, True)[:, cut].t()
    else:  # what zeros lack was taken from whole int32, so that one of 0 borrowed from its neighbour
        zeros = zeros + files.quantisation.zero_offset * ONES[bits]
        inner, within = _words(asked.inputs, bits)
        codes = unpacked(files.read(name, (inner, slice(*asked.outputs)), asked.device).t(), bits)[:, within]
    zeros = unpacked(zeros, bits, awq)[:, cut]
    scales = files.read(
        _scales(files, asked, f"{asked.stem}.scales"), (slice(None), slice(*asked.outputs)), asked.device
    ).t()
    scales, group = _of_inputs(files, asked, scales)
    return Quantised(INTEGERS[bits], codes, _of_scales(scales), _of_inputs(files, asked, zeros.t())[0], group)


def mxfp4(files: Files, asked: Asked) -> Quantised:
    """MXFP4: `_blocks` `[.., O, G, 16]` of two numbers a byte, low half first; `_scales` `[.., O, G]`, powers of 2."""
    inputs, index = asked.shape[-1], () if asked.expert is None else (asked.expert,)
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
    if first or (stop % MX_GROUP and stop != inputs):
        scales, group = chosen(scales, _groups(first, first + stop - start, MX_GROUP, scales), -1), 1
    return Quantised("fp4", codes, scales, None, group)


def _part(files: Files, asked: Asked) -> Tensor:
    """The codes asked for, which are stored one to a number."""
    return files.read(asked.stored, (slice(*asked.outputs), slice(*asked.inputs)), asked.device)


def _scales(files: Files, asked: Asked, name: str) -> str:
    """`name`, which holds scales; what else belongs to the matrix, for its inputs, is counted as used."""
    for end in ACTIVATION_SCALES:
        files.skip(asked.stem + end)
    if (dtype := files.entry(name).dtype) not in (*NUMBERS, *EXPONENTS):
        raise files.wrong(name, f"is {dtype}, which scales are not")
    return name


def _beside(files: Files, asked: Asked, name: str) -> tuple[Tensor, int]:
    """Scales or zeros `name` of the tensor, of each output, of its groups of inputs, or of blocks -> `[O, G]`, of the
    part asked for, and how many inputs share one.
    """
    (outputs, inputs), (start, stop), held = asked.shape, asked.outputs, files.read(name, (), asked.device)
    if held.numel() == 1:
        return held.view(1, 1).expand(stop - start, 1), asked.inputs[1] - asked.inputs[0]
    if held.shape == (outputs,):
        held = held[:, None]
    if held.dim() == 4 and held.shape[1] == held.shape[3] == 1:  # ModelOpt's FP8_PB_WO
        held = held[:, 0, :, 0]
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    if held.shape == blocks and outputs != blocks[0]:
        return _of_inputs(files, asked, chosen(held, _groups(start, stop, BLOCK, held), 0), BLOCK)
    if held.dim() != 2 or held.shape[0] != outputs or inputs % held.shape[1]:
        raise files.wrong(
            name,
            f"is {list(held.shape)} but {asked.stored!r} of {list(asked.shape)} needs {list(blocks)}, one per block of "
            f"{BLOCK} x {BLOCK}, or some for each of its outputs",
        )
    return _of_inputs(files, asked, held[start:stop])


def _of_inputs(files: Files, asked: Asked, given: Tensor, group: int | None = None) -> tuple[Tensor, int]:
    """What each group of all inputs has, `[O, G]` -> that of the inputs asked for, and how many of them share one: 1
    where they are not whole groups that lie together.
    """
    inputs, groups, (start, stop) = asked.shape[-1], given.shape[1], asked.inputs
    each = inputs // groups if group is None else group
    own = _groups_by_activation(files, asked.stem, each)
    if groups == 1:
        return given, stop - start
    if own is None and start % each == 0 and (stop % each == 0 or stop == inputs):
        return given[:, start // each : -(-stop // each)], each
    own = _groups(0, inputs, each, given) if own is None else own
    return chosen(given, own[start:stop], 1), 1


def _groups(start: int, stop: int, each: int, given: Tensor) -> Tensor:
    """The groups of `each` neighbours in which numbers from `start` to `stop` are, to choose of `given` by."""
    device = "cpu" if given.is_meta else given.device  # see `joined`
    return torch.arange(start, stop, device=device) // each


def _groups_by_activation(files: Files, stem: str, each: int) -> Tensor | None:
    """The group of each input where they were ordered by activation; None: `each` neighbours make a group."""
    for name, always in ((f"{stem}.weight_g_idx", True), (f"{stem}.g_idx", files.quantisation.by_activation)):
        if files.has(name):
            held = files.read(name)
            if held.is_meta:
                return held if always else None
            if held.min() < 0 or not held.any():  # left blank
                return None
            regular = torch.equal(held.long(), torch.arange(len(held), device=held.device) // each)
            return None if regular else held.long()
    return None


def _bits(files: Files, name: str, inputs: int, dim: int) -> int:
    """How many bits a code has of which int32 hold `inputs` along `dim`."""
    entry = files.entry(name)
    for bits in INTEGERS:
        if entry.dtype == "I32" and len(entry.shape) == 2 and entry.shape[dim] == -(-inputs * bits // 32):
            return bits
    raise files.wrong(
        name, f"is {entry.dtype} {list(entry.shape)}, which holds {inputs} inputs neither in 4 nor 8 bits"
    )


def _words(span: Span, bits: int) -> tuple[slice, slice]:
    """Where codes of `bits` lie: in which int32, and among those that these hold."""
    each, (start, stop) = 32 // bits, span
    first = start // each
    return slice(first, -(-stop // each)), slice(start - first * each, stop - first * each)


def _from_zero(signed: Tensor) -> Tensor:
    """int8 -> uint8, 128 more."""
    return signed.contiguous().view(torch.uint8) ^ 128


def _of_scales(given: Tensor) -> Tensor:
    """Scales as `Quantised` has them."""
    if given.dtype == torch.uint8:
        return powers(given)
    return given if given.dtype == torch.bfloat16 else given.float()


def unpacked(words: Tensor, bits: int, interleaved: bool = False) -> Tensor:
    """int32 `[n, w]`, each of numbers of `bits`, the first in the lowest, -> uint8 `[n, w * 32 / bits]`; AWQ's
    `interleaved` ones in the order of their outputs.
    """
    found = words.contiguous().view(torch.uint8)
    found = halves(found) if bits == 4 else found
    if not interleaved or found.is_meta:
        return found
    return found.view(found.shape[0], -1, 8)[..., AWQ_PLACES].flatten(1)


def halves(pairs: Tensor) -> Tensor:
    """Bytes `[.., n]` of two numbers, the low half first -> `[.., 2 n]`."""
    if pairs.is_meta:
        return pairs.new_empty(*pairs.shape[:-1], 2 * pairs.shape[-1])
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def powers(exponents: Tensor) -> Tensor:
    """A byte s -> 2 ** (s - 127), which bfloat16 has."""
    if exponents.is_meta:
        return torch.empty(exponents.shape, dtype=torch.bfloat16, device="meta")
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127).to(torch.bfloat16)
