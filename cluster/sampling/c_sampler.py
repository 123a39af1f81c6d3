"""The sampler in C, for CPUs: scores, noise included, are computed in registers and never written to memory.

Results must equal those of `TorchSampler`, except for the last digits of noise. In addition, the results of a row
depend on that row alone, and are the same to the bit with every set of vector instructions
(`kernels/choice/choice.c`).
"""

from ctypes import Structure, byref, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from cluster.capture.recorder import native
from cluster.kernels.library import Library
from cluster.sampling.noise import Noise, at_least_float32
from cluster.sampling.sampling_inputs import SamplerInput, SamplingInputs
from cluster.sampling.token_bitmask import DISALLOWED_TOKEN_BIAS, TOKENS_PER_WORD
from cluster.sampling.torch_sampler import row_thresholds

POINTERS = ("logits", "keys", "which", "hashes", "inverse", "scale", "least", "masks", "scores", "columns", "total")
NUMBERS = (
    *("requests", "each", "size", "stride", "keys_stride", "position", "inverse_stride", "scale_stride"),
    *("words", "count", "kind", "threads"),
)
BEST, TOP_LOGPROBS, SHARD_BEST = range(3)
MAX_COUNT = 64
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

    def noise(self, seeds: Tensor, first_positions: Tensor, count: int, hashes: Tensor, dtype: torch.dtype) -> Noise:
        """Compute the keys only; see `Sampler.noise`."""
        first_positions, keys = first_positions.contiguous(), first_positions.new_empty(first_positions.shape[0], count)
        keys_function = self._library.functions[
            "keys", torch.float32
        ]  # the function handles integers only: any dtype will do
        native(
            keys_function,
            seeds.data_ptr(),
            first_positions.data_ptr(),
            keys.data_ptr(),
            first_positions.shape[0],
            seeds.stride(0),
            count,
        )
        return Noise(keys, hashes, dtype)

    def best(self, sampler_input: SamplerInput) -> tuple[Tensor, Tensor]:
        """Return the best column and its score; see `Sampler.best`."""
        scores, columns, _ = self._run(BEST, sampler_input, 1)
        return columns[:, 0], scores[:, 0]

    def top_logprobs(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and columns of the best; see `Sampler.top_logprobs`."""
        scores, columns, _ = self._run(TOP_LOGPROBS, sampler_input, count)
        return scores, columns

    def shard_best(self, sampler_input: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best of a shard and its log-sum-exp; see `Sampler.shard_best`."""
        return self._run(SHARD_BEST, sampler_input, min(count, sampler_input.logits.shape[1]))

    def _run(self, kind: int, inputs: SamplerInput, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (for `TOP_LOGPROBS`, log-probabilities) and columns of the best, `[T, count]` each, and the
        log-sum-exp of the scores, `[T, 1]`, which only `SHARD_BEST` fills.

        Raises:
            ValueError: `count`, the masks or `draws` do not fit the logits; or there are both masks and filters, but no
                `thresholds`.
        """
        values, draws, thresholds, masks = inputs
        rows, column_count = values.shape
        if not 1 <= count <= min(column_count, MAX_COUNT):
            raise ValueError(f"{count} of {column_count} columns; C takes 1 to {MAX_COUNT} of at least as many")
        if masks is not None:
            if masks.shape[0] != rows or masks.shape[1] * TOKENS_PER_WORD < column_count:
                raise ValueError(f"masks {list(masks.shape)} do not fit logits {list(values.shape)}")
            if thresholds is None and any(draw.sampling.any_filtered for draw in draws):
                raise ValueError("with filters, the masks must be applied to the logits beforehand")
            masks = masks.contiguous()
        noise = draws[0].noise if draws else None
        if noise is not None and at_least_float32(noise.dtype) != at_least_float32(values.dtype):
            values = values.to(at_least_float32(noise.dtype))
        values, score_dtype = values if values.stride(1) == 1 else values.contiguous(), at_least_float32(values.dtype)
        outputs = (
            values.new_empty(rows, count, dtype=score_dtype),
            values.new_empty(rows, count, dtype=torch.int64),
            values.new_empty(rows, 1, dtype=score_dtype),
        )
        if noise is None:
            self._call(kind, values, outputs, {} if masks is None else {"masks": masks}, (rows, 1))
            return outputs
        # One call for each entry of `draws`, on its rows.
        draw_rows = [draw.requests * draw.rows_per_request for draw in draws]
        if sum(draw_rows) != rows:
            raise ValueError(f"{rows} rows of logits, and draws of {sum(draw_rows)}")
        start = 0
        for draw, row_count in zip(draws, draw_rows, strict=True):
            if row_count:
                row_slice = slice(start, start + row_count)
                draw_values, draw_outputs = (
                    (values, outputs)
                    if row_count == rows
                    else (values[row_slice], tuple(output[row_slice] for output in outputs))
                )
                draw_thresholds = row_thresholds(draw_values, draw) if thresholds is None else thresholds[row_slice]
                tensors = _draw_tensors(draw, draw_values, draw_thresholds)
                if masks is not None:
                    tensors["masks"] = masks[row_slice]
                self._call(kind, draw_values, draw_outputs, tensors, (draw.requests, draw.rows_per_request))
            start += row_count
        return outputs

    def _call(
        self,
        kind: int,
        values: Tensor,
        outputs: tuple[Tensor, ...],
        optional_tensors: dict[str, Tensor],
        rows: tuple[int, int],
    ) -> None:
        """Fill `outputs` (scores, columns, log-sum-exp) for logits `values`. `optional_tensors` has what
        `_draw_tensors` returns, and masks. `rows` is (requests, rows per request).
        """
        scores, columns, total = outputs
        column_count, (request_count, rows_per_request) = values.shape[1], rows
        tensors = {"logits": values, "scores": scores, "columns": columns, "total": total, **optional_tensors}
        struct = ChoiceStruct(
            requests=request_count,
            each=rows_per_request,
            size=column_count,
            stride=values.stride(0),
            count=scores.shape[1],
        )
        struct.kind, struct.threads, struct.barred = kind, torch.get_num_threads(), DISALLOWED_TOKEN_BIAS
        for name, tensor in tensors.items():
            setattr(struct, name, tensor.data_ptr())
        if "masks" in optional_tensors:
            struct.words = optional_tensors["masks"].shape[1]
        if "keys" in optional_tensors:
            keys = optional_tensors["keys"]
            # If a request has one key, all its rows use that key. Otherwise row i uses key i, or key `which[i]`.
            struct.keys_stride, struct.position = keys.stride(0), int(keys.shape[1] > 1)
            struct.inverse_stride, struct.scale_stride = (
                optional_tensors["inverse"].stride(0),
                optional_tensors["scale"].stride(0),
            )
        native(self._library.functions["choice", values.dtype], byref(struct))


def _draw_tensors(draw: SamplingInputs, values: Tensor, thresholds: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of `draw` that the C function reads, by the names of `POINTERS`, for rows of logits `values`.

    Raises:
        ValueError: the noise does not have one token hash per column. The C code does not check this.
    """
    noise, sampling, score_dtype = draw.noise, draw.sampling, at_least_float32(values.dtype)
    assert noise is not None, "all requests share a mode"
    if noise.hashes.shape[0] != values.shape[1]:
        raise ValueError(f"noise of {noise.hashes.shape[0]} tokens for {values.shape[1]} columns")
    tensors = {
        "keys": noise.keys if noise.keys.stride(1) == 1 else noise.keys.contiguous(),
        "hashes": noise.hashes.contiguous(),
        "inverse": sampling.inverse_temperature.to(score_dtype),
        "scale": sampling.noise_scale.to(score_dtype),
    }
    if draw.noise_index is not None:
        tensors["which"] = draw.noise_index.contiguous()
    if thresholds is not None:
        tensors["least"] = thresholds.to(score_dtype).contiguous()
    return tensors
