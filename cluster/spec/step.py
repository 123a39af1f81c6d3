"""One step of a rank: draft -> target -> extend. Every step runs these phases, whatever its requests are doing.

carried --draft--> tree --target--> logits, hidden --accept--> path --compact, extend--> carried

`carried` are the tensors that requests carry from step to step (`EagleDraftInput`).

Legend: R decoding requests, c prompt rows, F prompts that finish in this step, B = R + F, S depth, N tree nodes (root
included), H hidden. Decoding requests come before finished prompts, and tree rows before prompt rows, in every tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.attention.ancestor_bits import line_bits, packed
from cluster.batch import AttentionMetadata, Batch, PromptBatch, SamplingMode, with_prompts
from cluster.config.tree_shape import TreeShape
from cluster.device.timing import timer_of
from cluster.kv.page_table import PageTable
from cluster.models.runner import TargetRunner
from cluster.models.vocab import ShardedLogits
from cluster.sampling.logits_processor import LogitsTables
from cluster.sampling.noise import Noise, keys_along, vocabulary_hashes
from cluster.sampling.parameters import SamplingTable
from cluster.sampling.sampler import Scores, choose, logprobs, scores
from cluster.sampling.sampling_inputs import PhaseSampling, SamplingInputs, checksum
from cluster.sampling.torch_sampler import Sampler
from cluster.spec.compact import compact
from cluster.spec.draft import Draft, NoDraft
from cluster.spec.forced import forced_into
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.result import PhaseTimes, StepOutput, Trees
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accept, Accepted


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Tables with an entry for every request row; the last row is that of idle requests.

    `pages` has pages and committed lengths, `sampling` the sampling parameters, `adjusting` penalties and grammars,
    `carried` what requests carry from step to step.
    """

    pages: PageTable
    sampling: SamplingTable
    adjusting: LogitsTables
    carried: EagleDraftInput


class Step:
    """The step of one rank, bound to its target, draft and request tables."""

    def __init__(
        self,
        target: TargetRunner,
        draft: Draft,
        tables: RequestTables,
        enter: Callable[[str], None],
        sampler: Sampler,
        accept: Accept,
    ) -> None:
        """`enter` is called with the name of a phase when the phase begins. `accept` finds the accepted path."""
        self._target, self._draft, self._sampler, self._accept = target, draft, sampler, accept
        self._table, self.adjusting, self.carried = tables.pages, tables.adjusting, tables.carried
        self.enter = enter
        self._ids, self._timer = target.model.token_ids, timer_of(self.carried.bonus.device)

    @torch.inference_mode()
    def run(self, batch: Batch, shape: TreeShape) -> StepOutput:
        """Commit at least one token for each of the R requests, and the first token for each finished prompt."""
        r, s, n = batch.decodes, shape.num_steps, shape.num_draft_tokens
        moments = [self._timer.now()]
        # Draft: grow a tree `[R, N]` per request; node 0 (the root) is the bonus token of the last step.
        self.enter("draft")
        drawing = self._drawing(batch, s)
        own, final = drawing.narrow(0, r), drawing.narrow(r, batch.rows.shape[0])
        tree = self._draft.draft(batch, self.carried.take(batch.decode_rows), own, shape.drafted)
        # Add nodes for tokens that a grammar forces; they need no draft forward.
        if shape.forced and own.adjust is not None:
            tree = forced_into(tree, shape, own.adjust)
        moments.append(self._timer.now())

        # Target: one forward over all R N tree rows and c prompt rows. The mask of a plain chain is a constant.
        self.enter("target")
        line = shape.topk == 1 and not shape.forced
        hidden, aux, columns = self._forward(batch, tree, line)
        # A node at depth d chooses the token at position seq_len + 1 + d, so it has the noise number d of its request.
        # In a chain node i has depth i: `which` None says that node i has noise number i.
        which, paths = None if line else tree.depths, tree.paths(s) if own.adjust else None
        draws = own.along(n, s + 1, which, paths), final.at(0)
        chosen, won = choose(columns, draws, self._sampler)
        # `chosen` are tokens and `won` their scores: of R N tree nodes, then of the F last rows of finished prompts.
        # `first` `[F]` is the first token after each finished prompt; `sound` `[c]` says which prompt rows are finite.
        first, sound = chosen[r * n :], _sound(batch.prompt, hidden[r * n :], won[r * n :])
        accepted = self._accept(tree, chosen[: r * n].view(r, n), first, s)
        # From here on `won` `[R, S + 1]` are the scores of `accepted.tokens`.
        won = won[: r * n].view(r, n).gather(1, accepted.path)
        # Move the KV rows of the accepted path to the front of the window. In a chain they are there already.
        if not line:
            compact(self._target.pool, batch.window, accepted.path)
        moments.append(self._timer.now())

        # Extend: the draft reads the accepted rows with the target's true hidden states. Penalties and grammars count
        # the new tokens first, because the proposals made here are for the position after them.
        self.enter("extend")
        if own.adjust is not None and final.adjust is not None:
            own.adjust.commit(accepted.tokens, accepted.accept_len)
            if first.shape[0]:
                final.adjust.commit(first[:, None], torch.ones_like(first))
        carried = self._draft.extend(batch, accepted, aux or [hidden], self._next(drawing, accepted), shape)
        self.carried.put(batch.rows, carried)
        # New lengths: seq_len + accept_len of a decoding request, the prompt length of a finished prompt. The bonus is
        # not counted: the next step writes its KV.
        self._table.commit(batch.rows, with_prompts(batch.seq_lens + accepted.accept_len, batch.prompt.final_lens))
        # Node j of request i is row i N + j of the logits; log-probabilities are reported along the accepted path.
        asked = None
        if SamplingMode.LOGPROBS in batch.mode:
            nodes = torch.arange(r, device=chosen.device)[:, None] * n + accepted.path
            rows = with_prompts(nodes.view(-1), torch.arange(r * n, chosen.shape[0], device=chosen.device))
            asked = logprobs(columns, rows, with_prompts(accepted.tokens.view(-1), first), self._sampler)
        # With a sharded head all ranks get the same token even if one rank's sampling inputs are wrong. So a checksum
        # of the inputs, `drawn` `[1]`, is compared as well, without idle rows. `[0]`: there is nothing to compare.
        drawn = first[:0]
        if drawing.noise is not None and columns.shards is not None:
            real = batch.rows != self._table.idle_row
            drawn = checksum(draws, (real[:r], real[r:]))
        scored = None if batch.scored is None else self._scores(batch.prompt, batch.scored, hidden[r * n :])
        moments.append(self._timer.now())
        output = StepOutput.of(tree, accepted, won, (first, sound, drawn), PhaseTimes(self._timer, moments))
        output.logprobs, output.scores = asked, scored
        if SamplingMode.TREES in batch.mode:
            output.trees = Trees.of(tree, accepted)
        return output

    def _drawing(self, batch: Batch, num_steps: int) -> PhaseSampling:
        """Return the sampling inputs of the B requests: penalties, filters, and the noise of S + 2 positions.

        The positions of a decoding request are seq_len + 1 to seq_len + S + 2; those of a finished prompt begin at the
        prompt's length. The last position is for the proposals of the next step; without a draft it is left out.
        """
        noise = self._noise(batch, num_steps) if batch.sampling.noisy else None
        return PhaseSampling(batch.sampling, noise, self.adjusting.of(batch.rows, batch.mode))

    def _noise(self, batch: Batch, num_steps: int) -> Noise:
        """Return the noise of the B requests at S + 2 positions (S + 1 without a draft), for the ids scored here."""
        first = with_prompts(batch.seq_lens + 1, batch.prompt.final_lens)
        seeds, count = batch.sampling.seeds, num_steps + 1 + self._drafts
        vocab, dtype = self._target.model.arch.vocab_size, self.carried.hidden.dtype
        # Adjusted logits are gathered to whole rows first; other logits stay this rank's shard of the vocabulary.
        ids = range(vocab) if batch.mode.adjusts else self._ids
        hashes = vocabulary_hashes(len(ids), first.device, ids.start)
        if len(ids) < vocab:  # only keys, no values: this rank's shard of the draft's vocabulary may hold other tokens
            return Noise(keys_along(seeds, first, count), hashes, dtype)
        return self._sampler.noise(seeds, first, count, hashes, dtype)

    def _scores(self, prompt: PromptBatch, scored: Tensor, hidden: Tensor) -> Scores:
        """Return log-probabilities and ranks of the tokens after prompt rows `scored` `[q]`; `hidden` `[c, H]` has all
        prompt rows.
        """
        columns = self._target.logits(hidden.index_select(0, scored))
        return scores(columns, prompt.next_ids.index_select(0, scored), self._sampler)

    def _next(self, drawing: PhaseSampling, accepted: Accepted) -> SamplingInputs:
        """Return the sampling inputs of the token after each bonus, by which the draft ranks the next proposals."""
        if not self._drafts:
            return drawing.at(0)
        # The bonus is at seq_len + accept_len, so the token after it has noise number accept_len. The token after the
        # first token of a finished prompt has noise number 1.
        which, finals = accepted.accept_len, accepted.bonus.shape[0] - accepted.accept_len.shape[0]
        return drawing.next(with_prompts(which, which.new_ones(finals)))

    @property
    def _drafts(self) -> bool:
        return not isinstance(self._draft, NoDraft)

    def _forward(self, batch: Batch, tree: DraftTree, chain: bool) -> tuple[Tensor, list[Tensor], ShardedLogits]:
        """Run the target over tree rows `[R N]` and prompt rows `[c]`; return hidden and aux hidden of all rows, and
        the logits of the tree rows and of the F last prompt rows. If `chain`, node i sees nodes 0 to i.
        """
        r, n, prompt = batch.decodes, tree.tokens.shape[1], batch.prompt
        bits = line_bits(n, n, tree.tokens.device) if chain else packed(tree.ancestors)
        write = with_prompts(batch.window[:, :n].reshape(-1), prompt.write)
        tokens = with_prompts(tree.tokens.reshape(-1), prompt.token_ids)
        # Node j writes window slot j, but its position is seq_len + depth: siblings share a position, not a slot.
        positions = with_prompts((batch.seq_lens[:, None] + tree.depths).view(-1), prompt.positions)
        seen = AttentionMetadata(write, batch.tree(bits, n), prompt.text)
        hidden, aux = self._target.forward(tokens, positions, seen)
        if not prompt.token_ids.shape[0]:
            return hidden, aux, self._target.logits(hidden)
        heads = torch.cat([torch.arange(r * n, device=write.device), prompt.final_rows + r * n])
        return hidden, aux, self._target.logits(hidden.index_select(0, heads))


def _sound(prompt: PromptBatch, hidden: Tensor, won: Tensor) -> Tensor:
    """Return `[c]`: whether `hidden` `[c, H]` of each prompt row is finite; for the last row of a finished prompt, also
    whether the score of its first token, `won` `[F]`, is finite.
    """
    if not hidden.shape[0]:
        return prompt.token_ids.bool()
    sound = hidden.isfinite().all(-1)
    sound[prompt.final_rows] &= won.isfinite()
    return sound
