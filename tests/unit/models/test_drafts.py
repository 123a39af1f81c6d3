"""Every dialect of draft, first level and recurrent levels, against a dense float64 reference that shares no code."""

import pytest
import torch
from torch import Tensor

from cluster.arch import DraftLayer, read_draft, read_target
from cluster.config import ConfigError
from cluster.models.checkpoint import Checkpoint
from cluster.models.draft import DraftModel
from tests.loading import context, load_draft, load_target
from tests.parity.reference import target_reference
from tests.tiny import target_folder
from tests.unit.models import draft_folders as write
from tests.unit.models.draft_cases import CASES, Case

TEXT = [5, 40, 12, 33, 7, 7, 61, 20, 2, 18, 50, 9, 31]
GUESSED = [44, 3, 27]


class Causal:
    """Attention over everything given so far, one memory per layer."""

    def __init__(self, layers: tuple[DraftLayer, ...]) -> None:
        self.layers, self.memory = [layer.geometry for layer in layers], dict[int, Tensor]()

    def __call__(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        g = self.layers[layer]
        seen = torch.cat([self.memory[layer], kv]) if layer in self.memory else kv.clone()
        self.memory[layer] = seen
        both = seen.repeat_interleave(g.heads // g.kv_heads, 2)
        k, v = both[:, 0], both[:, -1, :, : g.value_dim]
        weights = torch.einsum("qhd,khd->hqk", q, k) * g.softmax_scale
        far = torch.arange(seen.shape[0] - q.shape[0], seen.shape[0])[:, None] - torch.arange(seen.shape[0])
        hidden = (far < 0) | (far >= (g.sliding_window or seen.shape[0]))
        return torch.einsum("hqk,khd->qhd", weights.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)


def loaded(folder: str, target: str, **overrides: object) -> DraftModel:
    return load_draft(folder, load_target(target, context()), context(), overrides)


def distance(case: Case, folder: str, **overrides: object) -> float:
    """Largest relative difference of logits, over all first-level rows and three recurrent levels."""
    draft, oracle = loaded(folder, case.target(), **overrides), case.oracle()
    seen = target_reference(case.target()).run(TEXT[:-1])
    spec, following = draft.spec, list(TEXT[1:])
    source = [seen.stream[b] for b in spec.aux_boundaries] if spec.use_aux_hidden_state else [seen.hidden]
    attend = Causal(spec.layers)
    rows, hiddens = draft.fuse_aux(torch.cat(source, -1)), oracle.fuse(seen)
    positions, tokens, worst = torch.arange(len(following)), torch.tensor(following), 0.0
    for guess in [*GUESSED, None]:
        normed, recurrent = draft.forward(tokens, positions, rows, attend)
        logits = draft.logits(normed).values
        expected, after = oracle.run(following, hiddens)
        columns = draft.target_ids if expected.shape[1] != logits.shape[1] else slice(None)
        wanted = expected[positions][:, columns]
        worst = max(worst, float((logits - wanted).abs().max() / wanted.abs().max()))
        if guess is None:
            break
        following, hiddens = [*following, guess], torch.cat([hiddens, after[-1:]])
        rows, tokens, positions = recurrent[-1:], torch.tensor([guess]), positions[-1:] + 1
    return worst


@pytest.mark.parametrize("name", CASES)
def test_draft_first_and_recurrent_logits_equal_the_reference(name: str) -> None:
    case = CASES[name]
    folder = case.folder()
    assert distance(case, folder) < 1e-9
    spec = read_draft(folder, Checkpoint(folder).shapes, read_target(case.target()))
    assert {key: getattr(spec, key) for key in case.expect} == case.expect


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("specforge", {"aux_numbering": "boundaries"}),
        ("speculators-raw", {"norm_before_residual": True}),
        ("3.1", {"recurrent": "pre"}),
    ],
)
def test_draft_override_changes_the_logits_and_is_named_as_source(name: str, override: dict[str, object]) -> None:
    """So the reference above can tell the two readings of each fact apart."""
    assert distance(CASES[name], CASES[name].folder(), **override) > 1e-3
    spec = loaded(CASES[name].folder(), CASES[name].target(), **override).spec
    assert {c.fact: (c.value, c.source) for c in spec.choices}[next(iter(override))] == (
        next(iter(override.values())),
        "speculative_draft_overrides",
    )


def named(config: dict[str, object], **tensors: torch.Tensor) -> str:
    return write.write({"x": torch.ones(1)} | tensors, config)


REFUSED = {
    "P-EAGLE": lambda: named({}, mask_hidden=torch.ones(1, 1, 96)),
    "P-EAGLE (arXiv": lambda: named({"speculators_model_type": "peagle"}),
    "EAGLE-4": lambda: named({"architectures": ["LlamaForCausalLMEagle4"]}),
    "DFlash": lambda: named({"architectures": ["DFlashDraftModel"]}),
    "DFlash (arXiv": lambda: named({"dflash_config": {}}),
    "DSpark": lambda: named({"architectures": ["DSparkDraftModel"]}),
    "Medusa": lambda: named({}, **{"0.0.linear.weight": torch.ones(2, 2)}),
    "Medusa heads (arXiv": lambda: named({"architectures": ["MedusaModel"]}),
    "parallel": lambda: named({}, **{"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(2, 2)}),
    "HASS": lambda: named({}, **{"embed_layernorm.weight": torch.ones(2)}),
    "MLP speculator": lambda: named({"architectures": ["MLPSpeculatorPreTrainedModel"]}),
    "no known format": lambda: named({"architectures": ["GPT2LMHeadModel"]}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_draft_formats_are_refused_by_name(what: str) -> None:
    folder = REFUSED[what]()
    with pytest.raises(ConfigError) as caught:
        loaded(folder, target_folder())
    assert what in str(caught.value)
    assert folder in str(caught.value)
    assert "EAGLE-3 and 3.1" in str(caught.value), "what is served is said"
