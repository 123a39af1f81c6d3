"""`DraftSpec`: every width, layer number and convention of a draft that speculation needs. A spec is resolved once,
from tensor names and shapes first and the config second. Code outside `arch/draft` does not read them from the config.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from cluster.arch.layer import LayerGeometry, QueryScaling
from cluster.status import ChosenFact, DraftInfo

Kind = Literal["eagle3", "eagle1", "mistral", "mtp", "frozen_kv"]
HiddenNorm = Literal["hidden_norm", "input_layernorm", "none"]


class ResolvedFact(NamedTuple):
    """A convention of a draft that its tensors cannot show: its name, its value, and the source of the value."""

    fact: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """One draft layer of width H. If `pair`, its attention reads `[input_layernorm(embedding) | norm(hidden)]`, 2 H
    wide; otherwise it reads only the hidden state, H wide. `hidden_norm` names the norm of the hidden state before
    attention.
    """

    geometry: LayerGeometry
    pair: bool
    hidden_norm: HiddenNorm


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A resolved draft. Extend is the forward in which the draft reads committed tokens with hidden states of the
    target.

    - `input_source`: at extend the draft reads aux hidden states (of several target layers), or the hidden state after
      the target's final norm.
    - `aux_boundaries`: a boundary j is the residual stream *entering* target layer j, or before the final norm if j is
      the number of layers. The draft reads these boundaries as aux hidden states.
    - `norm_before_fc`: one RMSNorm over the concatenated aux hidden states. `fc_norm`: one RMSNorm for each of them.
    - `fc` joins aux hidden states at extend (kind `eagle3`), or embedding and hidden in every forward (other kinds). It
      reads embedding and hidden in `concat_order`; if `pair_norms`, each of the two is normed before.
    - `norm_before_residual`: the residual of a `pair` layer is the normed hidden.
    - `recurrent`: the next level of the tree reads this level's output before ("pre") or after ("post") the final norm.
    - `embed`, `head`: the draft's own, or the target's. A `tied` head is the draft's own embedding. `embed_scale`
      multiplies the embedding; None: nothing does.
    - `vocab_map`: the draft ranks (has logits of) the ids of its `d2t`. `token_map`: it ranks the ids of a separate
      file. Otherwise it ranks all target ids.
    - `zero_first`: the embedding is zero in the first row of each sequence, which is at position i for runner i.
    - `query_scaling`: how queries are scaled with their position; None: they are not.
    - `runners`: the number of draft models, each with these `layers`. One runner drafts all levels of a tree; of
      several, each drafts one level. If `chained`, runner i reads the output of runner i - 1, otherwise the target's
      hidden.
    - A draft of kind `frozen_kv` keeps no KV. Each of its layers reads the keys and values of the target's layer
      `LayerGeometry.borrows`. The rows of all levels of a tree see the committed tokens only.
    - `choices`: the conventions that tensors cannot show, with the source of each. `doubts`: what is odd in the draft.
    - `tensor_name_rules`: (pattern, replacement) pairs, applied in order, that turn the name of a tensor in the model
      into its name in the checkpoint; {index} is `first_index` plus the runner's number.
    """

    kind: Kind
    dialect: str
    layers: tuple[DraftLayer, ...]
    target_hidden: int
    vocab_size: int
    draft_vocab_size: int
    dtype: str
    input_source: Literal["aux", "final_postnorm"] = "aux"
    aux_boundaries: tuple[int, ...] = ()
    norm_before_fc: bool = False
    fc_norm: bool = False
    fc: bool = True
    fc_bias: bool = False
    concat_order: Literal["embed_first", "hidden_first"] = "embed_first"
    pair_norms: bool = False
    norm_before_residual: bool = False
    final_norm: bool = True
    recurrent: Literal["pre", "post"] = "pre"
    embed: Literal["own", "target"] = "target"
    embed_scale: float | None = None
    head: Literal["own", "target", "tied"] = "target"
    vocab_map: bool = False
    token_map: tuple[int, ...] = ()
    zero_first: bool = False
    query_scaling: QueryScaling | None = None
    runners: int = 1
    first_index: int = 0
    chained: bool = False
    choices: tuple[ResolvedFact, ...] = ()
    doubts: tuple[str, ...] = ()
    tensor_name_rules: tuple[tuple[str, str], ...] = ()
    ignored_patterns: tuple[str, ...] = ()

    @property
    def algorithm(self) -> Literal["EAGLE", "EAGLE3", "NEXTN"]:
        """The value of `speculative_algorithm` for this kind of draft."""
        if self.kind == "eagle3":
            return "EAGLE3"
        return "NEXTN" if self.kind in ("mtp", "frozen_kv") else "EAGLE"

    @property
    def keeps_kv(self) -> bool:
        """Whether the draft keeps keys and values of its own. If not, it reads the target's."""
        return self.kind != "frozen_kv"

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of one runner."""
        return len(self.layers)

    @property
    def layer(self) -> LayerGeometry:
        """The geometry of the first layer. All layers have the same width and the same numbers of heads."""
        return self.layers[0].geometry

    @property
    def hidden(self) -> int:
        """The width of the hidden state that the draft reads and returns. It is the width of its layers, except for a
        draft that keeps no KV: that one reads and returns hidden states of the target's width.
        """
        return self.layer.hidden if self.keeps_kv else self.target_hidden

    @property
    def use_aux_hidden_state(self) -> bool:
        """Whether the target captures aux hidden states for this draft."""
        return self.input_source == "aux"

    @property
    def num_aux(self) -> int:
        """The number of target hidden states that the draft reads, concatenated from low to high layers."""
        return len(self.aux_boundaries) if self.use_aux_hidden_state else 1

    @property
    def fc_in(self) -> int:
        """The width of the target's hidden states that the draft reads for one token: `num_aux * target_hidden`."""
        return self.num_aux * self.target_hidden

    def stored_name(self, name: str, runner: int = 0) -> str:
        """Return the checkpoint's name for the tensor `name` of runner `runner`."""
        for pattern, replacement in self.tensor_name_rules:
            name = re.sub(pattern, replacement.replace("{index}", str(self.first_index + runner)), name)
        return name

    def ignored_by(self, runner: int = 0) -> tuple[str, ...]:
        """Return patterns of stored tensors that a runner does not use, such as those of the target or of other
        runners.
        """
        if self.runners == 1:
            return self.ignored_patterns
        other_numbers = "|".join(str(self.first_index + i) for i in range(self.runners) if i != runner)
        return (*self.ignored_patterns, rf"^(layers|mtp_layers|mtp\.layers)\.({other_numbers})\.")

    def info(self) -> DraftInfo:
        """Return a summary of the draft, with the source of each convention that tensors cannot show."""
        return DraftInfo(
            kind=self.kind,
            dialect=self.dialect,
            algorithm=self.algorithm,
            aux_boundaries=self.aux_boundaries,
            num_aux=self.num_aux,
            runners=self.runners,
            draft_vocab_size=self.draft_vocab_size,
            choices={choice.fact: ChosenFact(choice.value, choice.source) for choice in self.choices},
            doubts=self.doubts,
        )
