"""Every producer and every consumer of a hidden state use the same width and dtype, for all shapes of drafts.

Idle ranks are included. The tests follow the hidden states through models that are loaded from checkpoints: from the
boundaries of the target through `extend_input`, `fuse_aux` and `forward` into the table of draft inputs, and from the
table into `forward` again. The expected widths are computed from the configuration only.
"""

import itertools
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from cluster.batch import Batch, PromptBatch, SamplingBatch, SamplingMode
from cluster.config.tree_shape import TreeShape
from cluster.models.eagle3 import Eagle3Draft
from cluster.models.target import DecoderTarget
from cluster.spec.extend import extend_input
from cluster.spec.inputs import EagleDraftExtendInput, EagleDraftInput
from cluster.spec.verify import Accepted
from tests.support.loading import context, load_draft, load_target
from tests.support.tiny_checkpoints import draft_folder, target_folder

CPU = torch.device("cpu")
TARGET = {"hidden": 32, "layers": 4}
SHAPE = TreeShape(num_steps=2, topk=2, num_draft_tokens=4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
PROPOSAL_DTYPE = {torch.float64: torch.float64, torch.float32: torch.float32, torch.bfloat16: torch.float32}
POSITIONS = 32


@dataclass(frozen=True)
class Shape:
    """The options of one draft, and the dtype of the engine.

    A draft with `num_aux` 0 reads the last hidden state of the target, without fusing aux hidden states.
    """

    num_aux: int
    hidden: int
    layers: int
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    draft_vocab: int
    own_head: bool
    dtype: torch.dtype

    @property
    def aux_width(self) -> int:
        """The width A of the hidden states that the draft takes from the target, by definition."""
        return self.num_aux * TARGET["hidden"] if self.num_aux else TARGET["hidden"]


def shapes_of(num_aux: int) -> list[Shape]:
    """Return all combinations of widths, layer counts, norms of the aux hidden state and dtypes.

    The other options alternate over these combinations.
    """
    norms = list(itertools.product([False, True], repeat=2)) if num_aux else [(False, False)] * 4
    widths = (16, 32, 48) if num_aux else (32,)
    shapes = []
    for index, ((fc_norm, before_fc), hidden, layers) in enumerate(itertools.product(norms, widths, (1, 2, 3, 4))):
        turn = index + index // 4  # so the options do not depend on the layer count
        vocab = 40 if turn % 2 else 64
        own_head = vocab != 64 or hidden != TARGET["hidden"] or bool(turn % 4)
        flags = (fc_norm, before_fc, bool(turn // 2 % 2), bool(turn // 4 % 2))
        shapes += [Shape(num_aux, hidden, layers, *flags, vocab, own_head, dtype) for dtype in DTYPES]
    return shapes


@cache
def target_in(dtype: torch.dtype) -> DecoderTarget:
    return load_target(target_folder(**TARGET), context(dtype, max_position=POSITIONS))


def draft_of(shape: Shape) -> Eagle3Draft:
    folder = draft_folder(
        target_folder(**TARGET),
        num_aux=shape.num_aux or 1,
        use_aux=shape.num_aux > 0,
        layers=shape.layers,
        hidden=shape.hidden,
        draft_vocab=shape.draft_vocab,
        fc_norm=shape.fc_norm,
        norm_before_fc=shape.norm_before_fc,
        norm_output=shape.norm_output,
        norm_before_residual=shape.norm_before_residual,
        own_head=shape.own_head,
    )
    return load_draft(folder, target_in(shape.dtype), context(shape.dtype, max_position=POSITIONS))


def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
    """Stand in for attention: return each query row. Only the width of the result matters in these tests."""
    return q.flatten(1)


def batch_of(decodes: int, prompt_rows: int) -> Batch:
    """Return a batch of `decodes` decoding requests with 5 committed tokens each, and one final prompt chunk of
    `prompt_rows` tokens. The batch (0, 0) is that of an idle rank.
    """
    final_count = min(prompt_rows, 1)
    rows, prompt = torch.arange(decodes + final_count), torch.arange(prompt_rows)
    last = prompt[prompt_rows - final_count :]
    ones = torch.ones(decodes + final_count)
    return Batch(
        rows=rows,
        decode_rows=rows[:decodes],
        seq_lens=torch.full((decodes,), 5),
        window=torch.zeros(decodes, 0, dtype=torch.int64),
        sampling=SamplingBatch(ones, ones, ones, ones, ones, rows, any_random=False, any_filtered=False),
        prompt=PromptBatch(prompt, prompt, prompt + 1, prompt, prompt, None, last, prompt[:final_count]),
        mode=SamplingMode(0),
    )


def accepted_by(decodes: int, finals: int) -> Accepted:
    path = torch.zeros(decodes, SHAPE.num_steps + 1, dtype=torch.int64)
    bonus = torch.tensor([3] * decodes + [7] * finals, dtype=torch.int64)
    return Accepted(path, path + 3, torch.ones(decodes, dtype=torch.int64), bonus)


@cache
def features_of(dtype: torch.dtype, boundaries: tuple[int, ...], rows: int) -> tuple[Tensor, ...]:
    """Return the hidden states that the target gives to the draft: those at `boundaries`, or without boundaries the
    last one.
    """
    ids = torch.arange(rows)
    hidden, aux = target_in(dtype).forward(ids, ids, attend, boundaries)
    return tuple(aux or [hidden])


def check(shape: Shape, decodes: int, prompt_rows: int, draft: Eagle3Draft, table: EagleDraftInput) -> None:
    """Run one draft extend, put its output into `table`, and run a draft level on the values from `table`."""
    spec, dtype = draft.spec, shape.dtype
    batch, count = batch_of(decodes, prompt_rows), decodes * (SHAPE.num_steps + 1) + prompt_rows
    boundaries = spec.aux_boundaries if spec.use_aux_hidden_state else ()
    features = features_of(dtype, boundaries, decodes * SHAPE.num_draft_tokens + prompt_rows)
    assert len(features) == (shape.num_aux or 1)
    assert sum(feature.shape[1] for feature in features) == EagleDraftExtendInput.hidden_size_for(spec)

    accepted = accepted_by(decodes, batch.prompt.final_rows.shape[0])
    extend = extend_input(batch, accepted, list(features), SHAPE, spec)
    assert extend.hidden.shape == (count, EagleDraftExtendInput.hidden_size_for(spec))
    assert extend.hidden.dtype == EagleDraftExtendInput.dtype_for(dtype)

    fused = draft.fuse_aux(extend.hidden)
    assert (fused.shape, fused.dtype) == ((count, EagleDraftInput.hidden_size_for(spec)), dtype)
    normed, recurrent = draft.forward(extend.token_ids, extend.positions, fused, attend)
    assert recurrent.shape == normed.shape == (count, EagleDraftInput.hidden_size_for(spec))
    assert recurrent.dtype == normed.dtype == EagleDraftInput.dtype_for(dtype)
    logits = draft.logits(normed.index_select(0, extend.select)).values
    assert logits.shape == (batch.rows.shape[0], draft.target_ids.shape[0])

    top = logits.log_softmax(-1, dtype=PROPOSAL_DTYPE[dtype]).topk(SHAPE.topk, -1)
    bonus = torch.full((batch.rows.shape[0],), 9)
    hidden = recurrent.index_select(0, extend.select)
    proposal = EagleDraftInput(top.values, draft.target_ids[top.indices], hidden, bonus)
    table.put(batch.rows, proposal)  # raises if the width or dtype is wrong
    carried = table.take(batch.rows)
    for name in ("topk_logprobs", "topk_index", "hidden", "bonus"):
        assert torch.equal(getattr(carried, name), getattr(proposal, name)), name
    draft.forward(carried.topk_index[:, 0], carried.bonus, carried.hidden, attend)


def check_idle(draft: Eagle3Draft, dtype: torch.dtype, shape: Shape) -> None:
    """Check that idle inputs have the widths of real inputs, and that the draft runs on them."""
    no_rows = torch.zeros(0, dtype=torch.int64)
    empty_hidden = EagleDraftExtendInput.hidden_of(draft.spec, [torch.zeros(5, shape.aux_width, dtype=dtype)], no_rows)
    assert (empty_hidden.shape, empty_hidden.dtype) == ((0, shape.aux_width), dtype)
    assert draft.fuse_aux(empty_hidden).shape == (0, shape.hidden)
    for requests in (0, 3):
        idle = EagleDraftInput.create_idle_input(draft.spec, SHAPE.topk, dtype, CPU, requests)
        assert (idle.hidden.shape, idle.hidden.dtype) == ((requests, shape.hidden), dtype)
        assert (idle.topk_logprobs.shape, idle.topk_logprobs.dtype) == ((requests, SHAPE.topk), PROPOSAL_DTYPE[dtype])
        assert (idle.topk_index.shape, idle.bonus.shape) == ((requests, SHAPE.topk), (requests,))
        assert all(len(set(row)) == SHAPE.topk for row in idle.topk_index.tolist()), "the tokens of a row must differ"
        normed, recurrent = draft.forward(idle.topk_index[:, 0], idle.bonus, idle.hidden, attend)
        assert normed.shape == recurrent.shape == idle.hidden.shape
        assert recurrent.dtype == idle.hidden.dtype
        assert torch.isfinite(recurrent).all()
        assert draft.logits(normed).values.shape == (requests, shape.draft_vocab)


@pytest.mark.parametrize("num_aux", range(6))
@torch.inference_mode()
def test_hidden_width_and_dtype_agree_along_the_draft_chain(num_aux: int) -> None:
    torch.set_num_threads(1)
    for shape in shapes_of(num_aux):
        try:
            draft = draft_of(shape)
            assert EagleDraftExtendInput.hidden_size_for(draft.spec) == shape.aux_width
            assert EagleDraftInput.hidden_size_for(draft.spec) == shape.hidden
            assert draft.target_ids.shape == (shape.draft_vocab,)
            check_idle(draft, shape.dtype, shape)
            table = EagleDraftInput.create_idle_input(draft.spec, SHAPE.topk, shape.dtype, CPU, requests=4)
            for decodes, prompt_rows in ((0, 0), (3, 0), (0, 5), (2, 3)):
                check(shape, decodes, prompt_rows, draft, table)
        except Exception as error:
            raise AssertionError(f"{shape}: {error}") from error


def test_draft_shapes_are_at_least_500_and_cover_every_pair_of_options() -> None:
    shapes = [shape for num_aux in range(6) for shape in shapes_of(num_aux)]
    assert len(set(shapes)) >= 500
    options = ("layers", "norm_output", "norm_before_residual", "draft_vocab", "dtype")
    for first_option, second_option in itertools.combinations(options, 2):
        values = [{getattr(shape, name) for shape in shapes} for name in (first_option, second_option)]
        pairs = {(getattr(shape, first_option), getattr(shape, second_option)) for shape in shapes}
        assert len(pairs) == len(values[0]) * len(values[1]), (first_option, second_option)
    assert {(shape.hidden, shape.own_head) for shape in shapes} >= {(16, True), (32, True), (32, False), (48, True)}


@torch.inference_mode()
def test_hidden_of_wrong_width_or_dtype_is_refused() -> None:
    """The test above can fail: the code raises an error where the producer and the consumer do not agree."""
    shape = Shape(3, 48, 1, False, False, False, False, 40, True, torch.float32)
    draft = draft_of(shape)
    for wrong in (torch.zeros(2, 64), torch.zeros(2, 128), torch.zeros(2, 96, dtype=torch.float64)):
        with pytest.raises((RuntimeError, ValueError)):
            draft.fuse_aux(wrong)
    with pytest.raises(ValueError, match="are 128 wide together, and the draft takes 96"):
        EagleDraftExtendInput.hidden_of(draft.spec, [torch.zeros(5, 32)] * 4, torch.tensor([1]))
    table = EagleDraftInput.create_idle_input(draft.spec, SHAPE.topk, shape.dtype, CPU, requests=4)
    with pytest.raises((RuntimeError, IndexError)):
        table.put(torch.arange(2), EagleDraftInput.create_idle_input(None, SHAPE.topk, shape.dtype, CPU, requests=2))
    with pytest.raises(RuntimeError):
        table.put(
            torch.arange(2),
            EagleDraftInput.create_idle_input(draft.spec, SHAPE.topk, torch.float64, CPU, requests=2),
        )


def test_hidden_width_is_zero_without_a_draft() -> None:
    assert EagleDraftInput.hidden_size_for(None) == EagleDraftExtendInput.hidden_size_for(None) == 0
    idle = EagleDraftInput.create_idle_input(None, 1, torch.float32, CPU, requests=2)
    assert (idle.hidden.shape, idle.bonus.shape) == ((2, 0), (2,))
