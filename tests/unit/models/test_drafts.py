"""Drafts of every dialect against a dense float64 reference that shares no code with the product: the first level and
the recurrent levels.
"""

import pytest
import torch
from torch import Tensor

from cluster.arch import DraftLayer, read_draft, read_target
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint
from cluster.models.draft import DraftModel
from tests.parity.reference import target_reference
from tests.support.loading import context, load_draft, load_target
from tests.support.tiny_checkpoints import target_folder
from tests.unit.attention.dense import keys_values
from tests.unit.models import draft_folders as write
from tests.unit.models.draft_case import Case
from tests.unit.models.draft_cases import CASES

TEXT = [5, 40, 12, 33, 7, 7, 61, 20, 2, 18, 50, 9, 31]
DRAFTED_TOKENS = [44, 3, 27]


class CausalAttention:
    """Causal attention over the cells of all calls so far; `cached_cells` has them by layer."""

    def __init__(self, layers: tuple[DraftLayer, ...]) -> None:
        self.layers, self.cached_cells = [layer.geometry for layer in layers], dict[int, Tensor]()

    def __call__(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        geometry = self.layers[layer]
        cells = torch.cat([self.cached_cells[layer], kv]) if layer in self.cached_cells else kv.clone()
        self.cached_cells[layer] = cells
        k, v = (
            part.repeat_interleave(geometry.heads // geometry.kv_heads, 1) for part in keys_values(cells, geometry.cell)
        )
        weights = torch.einsum("qhd,khd->hqk", q, k) * geometry.softmax_scale
        largest_relative_error = torch.arange(cells.shape[0] - q.shape[0], cells.shape[0])[:, None] - torch.arange(
            cells.shape[0]
        )
        masked = (largest_relative_error < 0) | (largest_relative_error >= (geometry.sliding_window or cells.shape[0]))
        weights = weights.masked_fill(masked, float("-inf"))
        if sinks is not None:
            weights = torch.cat([weights, sinks[:, None, None].expand(-1, q.shape[0], 1)], -1)
        return torch.einsum("hqk,khd->qhd", weights.softmax(-1)[..., : cells.shape[0]], v).flatten(1)


def loaded_draft(folder: str, target: str, **overrides: object) -> DraftModel:
    return load_draft(folder, load_target(target, context()), context(), overrides)


def largest_relative_error(case: Case, folder: str, **overrides: object) -> float:
    """Return the largest relative error of the draft's logits over all first-level rows and three recurrent levels."""
    draft, oracle = loaded_draft(folder, case.target(), **overrides), case.oracle()
    target_pass = target_reference(case.target()).run(TEXT[:-1])
    spec, next_tokens = draft.spec, list(TEXT[1:])
    draft_inputs = (
        [target_pass.stream[b] for b in spec.aux_boundaries] if spec.use_aux_hidden_state else [target_pass.hidden]
    )
    attention = CausalAttention(spec.layers)
    rows, hiddens = draft.fuse_aux(torch.cat(draft_inputs, -1)), oracle.fuse(target_pass)
    positions, tokens, largest_error = torch.arange(len(next_tokens)), torch.tensor(next_tokens), 0.0
    for drafted_token in [*DRAFTED_TOKENS, None]:
        normed, recurrent = draft.forward(tokens, positions, rows, attention)
        logits = draft.logits(normed).values
        expected, next_hidden = oracle.run(next_tokens, hiddens)
        columns = draft.target_ids if expected.shape[1] != logits.shape[1] else slice(None)
        expected_rows = expected[positions][:, columns]
        largest_error = max(largest_error, float((logits - expected_rows).abs().max() / expected_rows.abs().max()))
        if drafted_token is None:
            break
        next_tokens, hiddens = [*next_tokens, drafted_token], torch.cat([hiddens, next_hidden[-1:]])
        rows, tokens, positions = recurrent[-1:], torch.tensor([drafted_token]), positions[-1:] + 1
    return largest_error


@pytest.mark.parametrize(
    ("use_sliding_window", "windows"), [(True, [None, 4]), (False, [None, None]), (None, [None, None])]
)
def test_windows_of_a_qwen3_draft_apply_only_if_use_sliding_window_is_true(
    use_sliding_window: bool | None, windows: list[int | None]
) -> None:
    """As in transformers, where the flag is false by default, also if `layer_types` names sliding layers."""
    overrides = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
    folder = write.speculators(2, True, layer_overrides={**overrides, "use_sliding_window": use_sliding_window})
    spec = read_draft(folder, Checkpoint(folder).shapes, read_target(target_folder()))
    assert [layer.geometry.sliding_window for layer in spec.layers] == windows


@pytest.mark.parametrize("name", CASES)
def test_draft_first_and_recurrent_logits_equal_the_reference(name: str) -> None:
    case = CASES[name]
    folder = case.folder()
    assert largest_relative_error(case, folder) < 1e-9
    spec = read_draft(folder, Checkpoint(folder).shapes, read_target(case.target()))
    assert {key: getattr(spec, key) for key in case.expected_spec} == case.expected_spec


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("specforge", {"aux_numbering": "boundaries"}),
        ("speculators-raw", {"norm_before_residual": True}),
        ("3.1", {"recurrent": "pre"}),
    ],
)
def test_draft_override_changes_the_logits_and_is_named_as_source(name: str, override: dict[str, object]) -> None:
    """The test above can therefore tell the two values of each fact apart."""
    assert largest_relative_error(CASES[name], CASES[name].folder(), **override) > 1e-3
    spec = loaded_draft(CASES[name].folder(), CASES[name].target(), **override).spec
    assert {c.fact: (c.value, c.source) for c in spec.choices}[next(iter(override))] == (
        next(iter(override.values())),
        "speculative_draft_overrides",
    )


def write_draft(config: dict[str, object], **tensors: torch.Tensor) -> str:
    return write.write({"x": torch.ones(1)} | tensors, config)


REFUSED = {
    "P-EAGLE": lambda: write_draft({}, mask_hidden=torch.ones(1, 1, 96)),
    "P-EAGLE (arXiv": lambda: write_draft({"speculators_model_type": "peagle"}),
    "EAGLE-4": lambda: write_draft({"architectures": ["LlamaForCausalLMEagle4"]}),
    "DFlash": lambda: write_draft({"architectures": ["DFlashDraftModel"]}),
    "DFlash (arXiv": lambda: write_draft({"dflash_config": {}}),
    "DSpark": lambda: write_draft({"architectures": ["DSparkDraftModel"]}),
    "Medusa": lambda: write_draft({}, **{"0.0.linear.weight": torch.ones(2, 2)}),
    "Medusa heads (arXiv": lambda: write_draft({"architectures": ["MedusaModel"]}),
    "parallel": lambda: write_draft({}, **{"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(2, 2)}),
    "HASS": lambda: write_draft({}, **{"embed_layernorm.weight": torch.ones(2)}),
    "MLP speculator": lambda: write_draft({"architectures": ["MLPSpeculatorPreTrainedModel"]}),
    "no known format": lambda: write_draft({"architectures": ["GPT2LMHeadModel"]}),
}


@pytest.mark.parametrize("format_name", REFUSED)
def test_unsupported_draft_formats_are_refused_by_name(format_name: str) -> None:
    folder = REFUSED[format_name]()
    with pytest.raises(ConfigError) as caught:
        loaded_draft(folder, target_folder())
    assert format_name in str(caught.value)
    assert folder in str(caught.value)
    assert "EAGLE-3 and 3.1" in str(caught.value), "the error must name the supported formats"
