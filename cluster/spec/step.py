"""One step of a rank: draft -> target -> extend. Every step runs these phases, whether its requests decode, read
prompts, or both.

draft input --draft--> tree --target--> logits, hidden --accept--> path --compact, extend--> draft input

The draft input is the set of tensors that requests carry from step to step (`EagleDraftInput`).

Legend: R decoding requests, c prompt rows, F prompts that finish in this step, B = R + F, S depth, n nodes of each tree
(root included), N nodes of each tree that the target verifies (an average if requests share rows, else n), H width of
hidden states. Decoding requests come before finished prompts, and tree rows before prompt rows, in every tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cluster.attention.ancestor_bits import chain_bits, pack_bits
from cluster.batch import AttentionMetadata, Batch, ExtendMode, PromptBatch, SamplingMode, with_prompts
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
from cluster.spec.backend import TreeBackend
from cluster.spec.compact import compact
from cluster.spec.draft import CanRest, Draft, HasChances, NoDraft
from cluster.spec.forced import add_forced_nodes
from cluster.spec.inputs import EagleDraftInput
from cluster.spec.lookup import TreeLookup, count_agreeing
from cluster.spec.result import PathFacts, PhaseTimes, StepOutput, Trees
from cluster.spec.row_budget import TargetRows, limit_drafts
from cluster.spec.token_history import Continuations, TokenHistory
from cluster.spec.tree import DraftTree
from cluster.spec.verify import Accepted


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Tables with one row per running request. The last row belongs to idle requests, which pad a batch.

    `pages` has pages and committed lengths, `sampling` the sampling parameters, `logits_tables` penalties and grammars,
    `draft_inputs` what requests carry from step to step. `history` has the tokens of each request so far, in which
    earlier occurrences of its last tokens are searched. `lookup` adds the tokens after such an occurrence ("looked-up
    tokens") to drafted trees. `history` is None if nothing is looked up; `lookup` is None if drafted trees get no
    looked-up tokens.
    """

    pages: PageTable
    sampling: SamplingTable
    logits_tables: LogitsTables
    draft_inputs: EagleDraftInput
    history: TokenHistory | None = None
    lookup: TreeLookup | None = None


class Step:
    """The step of one rank, bound to its target, draft and request tables."""

    def __init__(
        self,
        target: TargetRunner,
        draft: Draft,
        tables: RequestTables,
        enter_phase: Callable[[str], None],
        sampler: Sampler,
        trees: TreeBackend,
    ) -> None:
        """`enter_phase` is called with the name of a phase when the phase begins."""
        self._target, self._draft, self._sampler = target, draft, sampler
        self._accept, self._select_nodes = trees.accept, trees.select_nodes
        self._chances = draft.chances if isinstance(draft, HasChances) else None
        self._history, self._lookup = tables.history, tables.lookup
        self._table, self.logits_tables, self.draft_inputs = tables.pages, tables.logits_tables, tables.draft_inputs
        self.enter_phase = enter_phase
        self._ids, self._timer = target.model.token_ids, timer_of(self.draft_inputs.bonus.device)

    @torch.inference_mode()
    def run(self, batch: Batch, shape: TreeShape) -> StepOutput:
        """Run the step and return its results. It commits at least one token for each of the R decoding requests, and
        the first token for each finished prompt.
        """
        r, s, m = batch.decodes, shape.num_steps, batch.decodes * shape.num_draft_tokens
        times = [self._timer.now()]
        # Draft: grow a tree of n nodes per request; node 0 (the root) is the bonus token of the last step.
        self.enter_phase("draft")
        phase_sampling = self._phase_sampling(batch, s)
        decode_sampling, final_sampling = phase_sampling.narrow(0, r), phase_sampling.narrow(r, batch.rows.shape[0])
        tree, found = self._draft_trees(batch, decode_sampling, shape)
        target_rows, ranks = self._select(batch, tree, shape)
        times.append(self._timer.now())

        # Target: one forward over all M = R N tree rows and c prompt rows. The attention mask of a plain chain is a
        # constant.
        self.enter_phase("target")
        is_chain = shape.topk == 1 and not (shape.forced_nodes or shape.lookup_tokens)
        hidden, aux_hidden, logits = self._forward(batch, tree, target_rows, is_chain)
        tree_sampling = self._tree_sampling(decode_sampling, tree, target_rows, s, is_chain)
        sampling_inputs = tree_sampling, final_sampling.at_position(0)
        next_tokens, token_scores = choose(logits, sampling_inputs, self._sampler)
        # `next_tokens` `[M + F]` are the tokens chosen after each tree node, then after each finished prompt
        # (`first_tokens` `[F]`); `token_scores` are their scores. `finite_rows` `[c]` says which prompt rows have
        # finite hidden states.
        first_tokens, finite_rows = next_tokens[m:], _finite_rows(batch.prompt, hidden[m:], token_scores[m:])
        tree = self._acceptable(batch, tree, target_rows)
        accepted = self._accept(tree, target_rows.spread(next_tokens[:m]), first_tokens, s)
        accepted = replace(accepted, target_rows=target_rows)
        facts = self._learn(batch, tree, accepted, found, shape)
        # From here on `token_scores` `[R, S + 1]` are the scores of `accepted.tokens`.
        token_scores = target_rows.spread(token_scores[:m]).gather(1, accepted.path)
        # Move the KV of the accepted path to the front of the window, which is the slots for the nodes of a request's
        # tree. In a chain it is there already.
        if not is_chain:
            compact(self._target.pools, batch.window, accepted.path)
        times.append(self._timer.now())

        # Extend: the draft reads the accepted tokens with the target's true hidden states. Before that, penalties and
        # grammars take in the accepted tokens, because the draft proposes tokens for the position after them.
        self.enter_phase("extend")
        if decode_sampling.processor is not None and final_sampling.processor is not None:
            decode_sampling.processor.commit(accepted.tokens, accepted.accept_len)
            if first_tokens.shape[0]:
                final_sampling.processor.commit(first_tokens[:, None], torch.ones_like(first_tokens))
        self._extend(batch, accepted, aux_hidden or [hidden], phase_sampling, shape)
        # New lengths: seq_len + accept_len of a decoding request, the prompt length of a finished prompt. The bonus is
        # not counted: the next step writes its KV.
        self._table.commit(batch.rows, with_prompts(batch.seq_lens + accepted.accept_len, batch.prompt.final_lens))
        # Log-probabilities are reported along the accepted path.
        output_logprobs = None
        if SamplingMode.LOGPROBS in batch.mode:
            rows = with_prompts(
                target_rows.of(accepted.path).view(-1),
                torch.arange(m, next_tokens.shape[0], device=next_tokens.device),
            )
            output_logprobs = logprobs(
                logits, rows, with_prompts(accepted.tokens.view(-1), first_tokens), self._sampler
            )
        # With a sharded head all ranks get the same token even if one rank's sampling inputs are wrong. So the ranks
        # also compare a checksum `[1]` of the inputs of all rows that are not padding. The tensor is empty, `[0]`, if
        # the head is not sharded or no request samples.
        inputs_checksum = first_tokens[:0]
        if phase_sampling.noise is not None and logits.shards is not None:
            is_real = batch.rows != self._table.idle_row
            inputs_checksum = checksum(sampling_inputs, (target_rows.by_request(is_real[:r]), is_real[r:]))
        prompt_scores = None if batch.scored is None else self._scores(batch.prompt, batch.scored, hidden[m:])
        times.append(self._timer.now())
        output = StepOutput.of(
            tree,
            accepted,
            token_scores,
            (first_tokens, finite_rows, inputs_checksum),
            PhaseTimes(self._timer, times),
            facts if ranks is None else facts._replace(ranks=ranks.gather(1, accepted.path)),
        )
        output.logprobs, output.scores = output_logprobs, prompt_scores
        if SamplingMode.TREES in batch.mode:
            output.trees = Trees.of(tree, accepted)
        return output

    def _extend(
        self,
        batch: Batch,
        accepted: Accepted,
        target_hidden: list[Tensor],
        phase_sampling: PhaseSampling,
        shape: TreeShape,
    ) -> None:
        """Run the newly committed tokens through the draft, and store what each request carries to the next step.

        A draft that rests reads no tokens of decoding requests (`spec/resting.py`). Then store the bonus tokens of
        these requests, and the hidden states that the draft reads when it catches up. Only prompt rows run through the
        draft in such a step.
        """
        if batch.extend_mode.rests:
            r = batch.decodes
            assert isinstance(self._draft, CanRest), "plans let no other draft rest"
            self._draft.rest(batch, accepted, target_hidden)
            self.draft_inputs.bonus.index_copy_(0, batch.decode_rows, accepted.bonus[:r])
            if batch.extend_mode is ExtendMode.NOTHING:
                return
            phase_sampling = phase_sampling.narrow(r, batch.rows.shape[0])
            batch, accepted = batch.without_decodes(), accepted.without_decodes()
            target_hidden = [hidden[r:] for hidden in target_hidden]  # without trees each request has one row
        sampling_inputs = self._proposal_inputs(phase_sampling, accepted)
        self.draft_inputs.put(batch.rows, self._draft.extend(batch, accepted, target_hidden, sampling_inputs, shape))

    def _phase_sampling(self, batch: Batch, num_steps: int) -> PhaseSampling:
        """Return the sampling inputs of the B requests: penalties and grammars, filters, and the noise of S + 2
        positions. There is no noise if no request samples.

        The positions of a decoding request are seq_len + 1 to seq_len + S + 2; those of a finished prompt begin at the
        prompt's length. The last position is only for the proposals after a bonus token; without a draft it is left
        out. A noise number is an index into these positions.
        """
        noise = self._noise(batch, num_steps) if batch.sampling.any_random else None
        return PhaseSampling(batch.sampling, noise, self.logits_tables.processor_of(batch.rows, batch.mode))

    def _noise(self, batch: Batch, num_steps: int) -> Noise:
        """Return the noise of the B requests at S + 2 positions (S + 1 without a draft), for the token ids that this
        rank scores.
        """
        first_positions = with_prompts(batch.seq_lens + 1, batch.prompt.final_lens)
        seeds, count = batch.sampling.seeds, num_steps + 1 + self._has_draft
        vocab, dtype = self._target.model.arch.vocab_size, self.draft_inputs.hidden.dtype
        # Logits that penalties or grammars change are first gathered from all shards, so the rank needs noise for all
        # token ids. Other logits stay on their shard, so it needs noise only for the ids of its own shard, `_ids`.
        ids = range(vocab) if batch.mode.changes_logits else self._ids
        hashes = vocabulary_hashes(len(ids), first_positions.device, ids.start)
        # A shard caches no noise values: the draft may need them for token ids outside the target's shard. They are
        # computed from the keys at each use.
        if len(ids) < vocab:
            return Noise(keys_along(seeds, first_positions, count), hashes, dtype)
        return self._sampler.noise(seeds, first_positions, count, hashes, dtype)

    def _scores(self, prompt: PromptBatch, scored_rows: Tensor, hidden: Tensor) -> Scores:
        """Return, for each of the prompt rows `scored_rows` `[q]`, the log-probability of the prompt's next token, and
        how many tokens are at least as likely (`Scores.ranks`). `hidden` `[c, H]` has all prompt rows.
        """
        logits = self._target.logits(hidden.index_select(0, scored_rows))
        return scores(logits, prompt.next_ids.index_select(0, scored_rows), self._sampler)

    def _proposal_inputs(self, phase_sampling: PhaseSampling, accepted: Accepted) -> SamplingInputs:
        """Return the sampling inputs of the token after each bonus; the draft ranks the next proposals with them."""
        if not self._has_draft:
            return phase_sampling.at_position(0)
        # The bonus is at seq_len + accept_len, so the token after it has noise number accept_len. The token after the
        # first token of a finished prompt has noise number 1.
        noise_index, final_prompts = accepted.accept_len, accepted.bonus.shape[0] - accepted.accept_len.shape[0]
        return phase_sampling.at_position_of_each(with_prompts(noise_index, noise_index.new_ones(final_prompts)))

    @property
    def _has_draft(self) -> bool:
        return not isinstance(self._draft, NoDraft)

    def _select(self, batch: Batch, tree: DraftTree, shape: TreeShape) -> tuple[TargetRows, Tensor | None]:
        """Return the nodes to verify as rows of the target's forward, and the ranks `[R, n]` of all nodes
        (`NodeSelection`). The ranks are None if requests do not share rows.
        """
        requests, nodes = tree.tokens.shape
        if not shape.max_nodes or tree.scores is None or batch.sampling.draft_limits is None:
            assert not shape.selects_nodes, "a draft whose trees have no scores cannot share rows"
            return TargetRows(requests, nodes), None
        limits = batch.sampling.draft_limits[:requests]
        selection = self._select_nodes(tree.scores, tree.depths, limits, requests * shape.num_draft_tokens)
        return TargetRows(requests, nodes, selection if shape.selects_nodes else None), selection.ranks

    def _acceptable(self, batch: Batch, tree: DraftTree, target_rows: TargetRows) -> DraftTree:
        """Return the tree with `NO_TOKEN` in place of tokens that must not be accepted: those of nodes that are not
        verified, and those beyond the limits of requests.
        """
        if SamplingMode.LIMITED in batch.mode and batch.sampling.draft_limits is not None:
            tree = limit_drafts(tree, batch.sampling.draft_limits[: batch.decodes])
        return target_rows.without_others(tree)

    def write_zeros(self, slots: int) -> None:
        """Write zeros to the first `slots` slots of each of the target's pools, which hold nothing yet."""
        for pool in self._target.pools.all:
            pool.kv[:, :slots].zero_()

    def forget_chances(self) -> None:
        """Forget the learned chances of acceptance, for instance after trial steps with made-up tokens."""
        if self._chances is not None:
            self._chances.forget()
        if self._lookup is not None:
            self._lookup.chances.forget()

    def _draft_trees(
        self, batch: Batch, sampling: PhaseSampling, shape: TreeShape
    ) -> tuple[DraftTree, Continuations | None]:
        """Return the draft trees of a step, and the tokens that the lookup found (`spec/lookup.py`; None without a
        lookup). These tokens are returned even if the trees of this step have no branch for them.
        """
        tree = self._draft.draft(batch, self.draft_inputs.take(batch.decode_rows), sampling, shape.drafted_shape)
        # Add nodes for tokens that a grammar forces; they need no draft forward.
        if shape.forced_nodes and sampling.processor is not None:
            tree = add_forced_nodes(tree, shape, sampling.processor)
        if self._lookup is None:
            return tree, None
        found = self._lookup.find(batch)
        return self._lookup.add_to(tree, found) if shape.lookup_tokens else tree, found

    def _learn(
        self, batch: Batch, tree: DraftTree, accepted: Accepted, found: Continuations | None, shape: TreeShape
    ) -> PathFacts:
        """Count which nodes were accepted, if the draft goes by learned chances. Append the committed tokens to the
        history, if there is one. Return what the host is told about looked-up tokens: all None without a lookup.
        """
        sampling, r = batch.sampling, batch.decodes
        if self._chances is not None and sampling.draft_limits is not None:
            self._chances.count(tree, accepted, sampling.noise_scale[:r] > 0, sampling.draft_limits[:r])
        if self._history is not None:
            self._history.append_accepted(batch, accepted)
        if found is None or self._lookup is None:
            return PathFacts()
        agreeing = count_agreeing(found, accepted)
        if not shape.lookup_tokens:
            return PathFacts(agreeing=agreeing)
        if sampling.draft_limits is not None:
            self._lookup.chances.count(found.matched, agreeing, accepted.accept_len, sampling.draft_limits[:r])
        is_drafted = (accepted.path > 0) & (accepted.path < shape.drafted_shape.drafted_nodes)
        return PathFacts(agreeing=agreeing, drafted=is_drafted.sum(1))

    def _tree_sampling(
        self, decode_sampling: PhaseSampling, tree: DraftTree, target_rows: TargetRows, num_steps: int, is_chain: bool
    ) -> SamplingInputs:
        """Return the sampling inputs of the tree rows. The token chosen after a node at depth d is at position
        seq_len + 1 + d, so the node has the noise number d of its request.
        """
        paths = tree.paths(num_steps) if decode_sampling.processor else None
        if target_rows.requests is not None:
            paths = None if paths is None else target_rows.take(paths)[:, None]
            return decode_sampling.of_rows(target_rows.requests, target_rows.take(tree.depths), paths)
        # In a chain node i has depth i: `noise_index` None says that node i has noise number i.
        noise_index = None if is_chain else tree.depths
        return decode_sampling.along_positions(tree.tokens.shape[1], num_steps + 1, noise_index, paths)

    def _forward(
        self, batch: Batch, tree: DraftTree, target_rows: TargetRows, is_chain: bool
    ) -> tuple[Tensor, list[Tensor], ShardedLogits]:
        """Run the target over tree rows `[M]` and prompt rows `[c]`. Return hidden and aux hidden of all rows, and the
        logits of the tree rows and of the last row of each of the F finished prompts. If `is_chain`, node i sees nodes
        0 to i.
        """
        n, m, prompt = tree.tokens.shape[1], target_rows.count, batch.prompt
        bits = chain_bits(n, n, tree.tokens.device) if is_chain else pack_bits(tree.ancestors)
        # Node j writes window slot j, but its position is seq_len + depth: siblings share a position, not a slot.
        written_slots = with_prompts(target_rows.take(batch.window[:, :n]), prompt.write)
        tokens = with_prompts(target_rows.take(tree.tokens), prompt.token_ids)
        positions = with_prompts(target_rows.take(batch.seq_lens[:, None] + tree.depths), prompt.positions)
        attention = AttentionMetadata(written_slots, target_rows.tree(batch, bits), prompt.text)
        hidden, aux_hidden = self._target.forward(tokens, positions, attention)
        if not prompt.token_ids.shape[0]:
            return hidden, aux_hidden, self._target.logits(hidden)
        logit_rows = torch.cat([torch.arange(m, device=written_slots.device), prompt.final_rows + m])
        return hidden, aux_hidden, self._target.logits(hidden.index_select(0, logit_rows))


def _finite_rows(prompt: PromptBatch, hidden: Tensor, token_scores: Tensor) -> Tensor:
    """Return a bool mask `[c]` of the prompt rows whose `hidden` `[c, H]` is finite. The last row of a finished prompt
    counts as finite only if the score of the prompt's first token, in `token_scores` `[F]`, is finite too.
    """
    if not hidden.shape[0]:
        return prompt.token_ids.bool()
    finite_rows = hidden.isfinite().all(-1)
    finite_rows[prompt.final_rows] &= token_scores.isfinite()
    return finite_rows
