"""The sampler in C, for CPUs: scores, noise included, are computed in registers and never written to memory.

Results must equal those of `TorchSampler`, except for the last digits of noise. In addition, the bits of a row depend
on that row alone, and are the same with every set of vector instructions (`kernels/choice/choice.c`).
"""

from ctypes import Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.sampling.noise import Noise, at_least_float32
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import BARRED, WORD
from cluster.sampling.torch_sampler import least_of

POINTERS = ("logits", "keys", "which", "hashes", "inverse", "scale", "least", "masks", "scores", "columns", "total")
NUMBERS = (
    *("requests", "each", "size", "stride", "keys_stride", "position", "inverse_stride", "scale_stride"),
    *("words", "count", "kind", "threads"),
)
BEST, LIKELIEST, FOUND = range(3)
MOST = 64
"""The largest `count` of one call: the most tokens of a row that it can return."""


class ChoiceStruct(Structure):
    """Arguments of the C function, laid out as `struct aerie_choice`."""

    _fields_ = (
        *((name, c_void_p) for name in POINTERS),
        *((name, c_int64) for name in NUMBERS),
        ("barred", c_double),
    )


class CSampler:
    """`Sampler` by the functions of a compiled `library`."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def noise(self, seeds: Tensor, first: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Compute the keys only; see `Sampler.noise`."""
        first, keys = first.contiguous(), first.new_empty(first.shape[0], count)
        run = self._library.functions["keys", torch.float32]  # it handles integers only: the dtype does not matter
        native(run, seeds.data_ptr(), first.data_ptr(), keys.data_ptr(), first.shape[0], seeds.stride(0), count)
        return Noise(keys, hashes, dtype)

    def best(self, rows: SamplerInput) -> tuple[Tensor, Tensor]:
        """Return the best column and its score; see `Sampler.best`."""
        scores, columns, _ = self._run(BEST, rows, 1)
        return columns[:, 0], scores[:, 0]

    def likeliest(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and columns of the best; see `Sampler.likeliest`."""
        scores, columns, _ = self._run(LIKELIEST, rows, count)
        return scores, columns

    def found(self, rows: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best of a shard and its log-sum-exp; see `Sampler.found`."""
        return self._run(FOUND, rows, min(count, rows.values.shape[1]))

    def _run(self, kind: int, inputs: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores and columns `[T, count]`, and the log-sum-exp `[T, 1]`, which only `FOUND` fills.

        Raises:
            ValueError: `count`, the masks or `draws` do not fit the logits, or masks come with filters.
        """
        values, draws, least, masks = inputs
        rows, size = values.shape
        if not 1 <= count <= min(size, MOST):
            raise ValueError(f"{count} of {size} columns; C takes 1 to {MOST} of at least as many")
        if masks is not None:
            if masks.shape[0] != rows or masks.shape[1] * WORD < size:
                raise ValueError(f"masks {list(masks.shape)} do not fit logits {list(values.shape)}")
            if least is None and any(draw.sampling.filtered for draw in draws):
                raise ValueError("what filters keep follows from logits that are barred already")
            masks = masks.contiguous()
        noise = draws[0].noise if draws else None
        if noise is not None and at_least_float32(noise.dtype) != at_least_float32(values.dtype):
            values = values.to(at_least_float32(noise.dtype))
        values, wide = values if values.stride(1) == 1 else values.contiguous(), at_least_float32(values.dtype)
        made = (
            values.new_empty(rows, count, dtype=wide),
            values.new_empty(rows, count, dtype=torch.int64),
            values.new_empty(rows, 1, dtype=wide),
        )
        if noise is None:
            self._call(kind, values, made, {} if masks is None else {"masks": masks}, (rows, 1))
            return made
        # One call for each entry of `draws`, on its rows.
        counts = [draw.requests * draw.each for draw in draws]
        if sum(counts) != rows:
            raise ValueError(f"{rows} rows of logits, and draws of {sum(counts)}")
        start = 0
        for draw, of_draw in zip(draws, counts, strict=True):
            if of_draw:
                cut = slice(start, start + of_draw)
                some, own = (values, made) if of_draw == rows else (values[cut], tuple(each[cut] for each in made))
                kept = least_of(some, draw) if least is None else least[cut]
                drawn = _drawn(draw, some, kept)
                if masks is not None:
                    drawn["masks"] = masks[cut]
                self._call(kind, some, own, drawn, (draw.requests, draw.each))
            start += of_draw
        return made

    def _call(
        self, kind: int, values: Tensor, made: tuple[Tensor, ...], drawn: dict[str, Tensor], rows: tuple[int, int]
    ) -> None:
        """Fill `made` (scores, columns, log-sum-exp) for logits `values`; `rows` is (requests, rows per request)."""
        scores, columns, total = made
        size, (requests, each) = values.shape[1], rows
        given = {"logits": values, "scores": scores, "columns": columns, "total": total, **drawn}
        struct = ChoiceStruct(requests=requests, each=each, size=size, stride=values.stride(0), count=scores.shape[1])
        struct.kind, struct.threads, struct.barred = kind, torch.get_num_threads(), BARRED
        for name, tensor in given.items():
            setattr(struct, name, tensor.data_ptr())
        if "masks" in drawn:
            struct.words = drawn["masks"].shape[1]
        if "keys" in drawn:
            keys = drawn["keys"]
            # If a request has one key, all its rows use that key. Otherwise row i uses key i, or key `which[i]`.
            struct.keys_stride, struct.position = keys.stride(0), int(keys.shape[1] > 1)
            struct.inverse_stride, struct.scale_stride = drawn["inverse"].stride(0), drawn["scale"].stride(0)
        native(self._library.functions["choice", values.dtype], byref(struct))


def _drawn(draw: SamplingInputs, values: Tensor, least: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of `draw` that the C function reads, by the names of `POINTERS`, for rows of logits `values`.

    Raises:
        ValueError: the noise does not have one token per column. The C code does not check this.
    """
    noise, sampling, wide = draw.noise, draw.sampling, at_least_float32(values.dtype)
    assert noise is not None, "all requests share a mode"
    if noise.hashes.shape[0] != values.shape[1]:
        raise ValueError(f"noise of {noise.hashes.shape[0]} tokens for {values.shape[1]} columns")
    drawn = {
        "keys": noise.keys if noise.keys.stride(1) == 1 else noise.keys.contiguous(),
        "hashes": noise.hashes.contiguous(),
        "inverse": sampling.inverse_temperature.to(wide),
        "scale": sampling.noise_scale.to(wide),
    }
    if draw.which is not None:
        drawn["which"] = draw.which.contiguous()
    if least is not None:
        drawn["least"] = least.to(wide).contiguous()
    return drawn
