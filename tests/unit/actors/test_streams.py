"""How a stream remembers what it was sent, and in which order streams come back."""

from dataclasses import replace

import pytest

from cluster.actors.messages import Loss
from cluster.actors.streams import MAX_FRUITLESS_RESUMES, OpenStream, Recovery
from cluster.request import Request, RequestParams, Seeds, SequenceOutput, SpeculationCounts, TokenLogprob

LOSS = Loss(1, "died", 7, "target", "the process died", 0, 0.0, 0.1)


def stream(name: str = "s", resumed: int = 0) -> OpenStream:
    prompt = tuple(range(1, 6 + resumed))
    return OpenStream(Request(name, prompt, RequestParams(max_tokens=50, seed=9), resumed, 1))


def output(*tokens: int, **more: object) -> SequenceOutput:
    return SequenceOutput("s", tokens, **more)  # type: ignore[arg-type]


def test_stream_is_resubmitted_with_its_sent_tokens_as_prompt() -> None:
    s = stream(resumed=2)
    assert s.submission() == s.request
    s.record(output(10))
    s.record(output(11, 12))
    s.on_incarnation_lost(drafted_per_tree=3)
    again = s.submission()
    assert again.prompt_token_ids == (1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
    assert again.resumed_tokens == 5
    assert (again.params, again.routed_dp_rank, again.request_id) == (s.request.params, 1, "s")


def test_stream_reports_prompt_logprobs_only_once_across_restarts() -> None:
    """It came with the first token; until then a new life is asked as the first was."""
    s = stream()
    s.request = replace(s.request, params=replace(s.request.params, prompt_logprobs=2))
    assert s.submission() == s.request
    s.on_incarnation_lost(drafted_per_tree=3)
    assert s.submission() == s.request
    line = TokenLogprob(2, -0.5, ((2, -0.5),), 1)
    assert s.record(output(10, prompt_logprobs=(line,))).prompt_logprobs == (line,)
    s.on_incarnation_lost(drafted_per_tree=3)
    again = s.submission()
    assert again.params == replace(s.request.params, prompt_logprobs=None)
    assert again.prompt_token_ids == (*s.request.prompt_token_ids, 10)


def test_stream_sums_speculation_counts_of_all_incarnations() -> None:
    s = stream()
    s.submission()
    for tokens in ((1,), (2, 3), (4,), (5, 6, 7)):  # the first ends the prompt
        s.record(output(*tokens))
    s.on_incarnation_lost(drafted_per_tree=3)
    s.submission()
    for tokens in ((8,), (9, 10)):
        s.record(output(*tokens))
    s.on_incarnation_lost(drafted_per_tree=3)
    s.submission()
    s.record(output(11))
    last = s.record(output(12, 13, finish_reason="length", speculation=SpeculationCounts(5, 15, (1, 4, 0, 0))))
    assert last.speculation == SpeculationCounts(9, 27, (2, 6, 1, 0)), "each tree once"


def test_stream_without_speculation_reports_no_speculation_counts() -> None:
    s = stream()
    s.submission()
    s.record(output(1))
    s.record(output(2))
    s.on_incarnation_lost(drafted_per_tree=0)
    assert s.record(output(finish_reason="stop")).speculation is None


def test_stream_reports_the_first_cached_token_count_after_a_restart() -> None:
    s = stream()
    s.cached_tokens = 4
    assert s.record(output(1, cached_tokens=4)).cached_tokens == 4
    s.on_incarnation_lost(drafted_per_tree=3)
    assert s.record(output(2, cached_tokens=64)).cached_tokens == 4


class Gang:
    """A gang that takes in `room` streams at a time and dies of the poisoned ones, told as a router is told: when their
    prompt runs, or where `late` in the step after.
    """

    def __init__(
        self, streams: list[OpenStream], poison: set[str], room: int, announced: bool = True, late: bool = False
    ) -> None:
        self.streams, self.poison, self.room, self.announced, self.late = streams, poison, room, announced, late
        self.recovery = Recovery()
        self.given: list[list[str]] = []  # the streams of each life that were submitted at once, in order
        self.gang_errors, self.length = 0, 5

    def open(self) -> list[OpenStream]:
        return [s for s in self.streams if not s.ended]

    def live(self, turn: list[OpenStream], steps: int | None = None) -> None:
        """A life that is given `turn`: ends with a poison in its step, after so many steps, or without open streams."""
        queue: list[OpenStream] = []
        running: list[OpenStream] = []
        self.given.append([s.name for s in turn])
        while (queue or running or turn) and (steps is None or steps > 0):
            for s in turn:
                s.submission()
            queue, turn = queue + turn, []
            while queue and len(running) < self.room:
                running.append(queue.pop(0))
                running[-1].admitted = self.announced
            if any(s.name in self.poison and s.has_first_token >= self.late for s in running):
                steps = 0
                break
            for s in running:
                before, s.started = s.made_progress, True
                s.record(output(1, finish_reason="length" if len(s.sent_tokens) == self.length - 1 else None))
                if (s.made_progress and not before) or s.ended:
                    turn += self.recovery.on_settled(s.name)
            running = [s for s in running if not s.ended]
            steps = None if steps is None else steps - 1
        if steps is not None:
            self.die()

    def die(self) -> None:
        self.gang_errors += 1
        for s in self.open():
            s.on_incarnation_lost(drafted_per_tree=3)
        self.recovery.on_loss(self.open(), LOSS)

    def come_back(self, steps: int | None = None) -> None:
        self.live(self.recovery.begin(self.open()), steps)

    def serve_all(self) -> None:
        while self.open():
            assert self.gang_errors < 40, "no end"
            self.come_back()


def many(count: int, prefix: str = "s") -> list[OpenStream]:
    return [stream(f"{prefix}{i}") for i in range(count)]


def failed(gang: Gang) -> set[str]:
    ended = {s.name: s.queue.get_nowait() for s in gang.streams if not s.queue.empty()}
    assert all(isinstance(e, SequenceOutput) and e.finish_reason == "error" for e in ended.values())
    return set(ended)


def test_recovery_resubmits_all_streams_at_once_and_started_streams_first() -> None:
    gang = Gang(many(116), set(), room=16)
    gang.streams[100].started = True  # of an earlier life
    for _ in range(2):
        gang.come_back(steps=2)
        assert not any(s.in_fatal_step for s in gang.streams)
    gang.serve_all()
    everybody, running = [f"s{i}" for i in range(116)], [f"s{i}" for i in range(15)] + ["s100"]
    assert gang.given[0] == ["s100", *(n for n in everybody if n != "s100")]
    assert gang.given[1] == gang.given[2] == running + [n for n in everybody if n not in running]
    assert sorted(n for life in gang.given[2:] for n in life) == sorted(everybody) and failed(gang) == set()


def test_only_streams_in_the_fatal_step_are_suspects() -> None:
    waits, works, had = stream("waits"), stream("works"), stream("had")
    for s in (waits, works, had):
        s.submission()
    works.admitted = had.admitted = True
    works.record(output(1))
    for _ in range(2):
        had.record(output(1))
    for s in (waits, works, had):
        s.on_incarnation_lost(drafted_per_tree=3)
    assert [s.in_fatal_step for s in (waits, works, had)] == [False, True, False]
    never = stream()
    never.on_incarnation_lost(drafted_per_tree=3)
    assert not never.in_fatal_step and never.fruitless_resumes == 0


def test_single_poison_stream_ends_after_three_resumptions_and_others_finish() -> None:
    gang = Gang([*many(6), stream("poison")], set(), room=16)
    gang.streams[-1].ended = True
    gang.come_back(steps=2)  # the others have tokens before it comes
    gang.streams[-1].ended, gang.poison = False, {"poison"}
    gang.come_back()
    gang.serve_all()
    assert failed(gang) == {"poison"} and gang.gang_errors == 1 + 4


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 33])
@pytest.mark.parametrize("place", [0, 0.5, 0.99])
def test_recovery_bisects_suspects_and_ends_only_the_poison_stream(count: int, place: float, late: bool) -> None:
    """A late one has a token of each life, and is no less at fault."""
    streams = many(count)
    poison = streams[int(count * place)].name
    gang = Gang(streams, {poison}, room=64, late=late)
    gang.length = 40 if late else 5
    gang.serve_all()
    assert failed(gang) == {poison}
    # the first, the same once more, one for each halving, and those after which the last is resumed
    assert gang.gang_errors <= 2 + count.bit_length() + MAX_FRUITLESS_RESUMES
    assert all(len(s.sent_tokens) == gang.length for s in streams if s.name != poison)


@pytest.mark.parametrize(
    ("count", "poison", "room", "announced"),
    [(12, {"s3", "s9"}, 64, True), (60, {"s57"}, 4, True), (9, {"s4"}, 64, False)],
    ids=["two", "at the end of a long queue", "its beginning is never announced"],
)
def test_recovery_ends_every_poison_stream_and_no_other_stream(
    count: int, poison: set[str], room: int, announced: bool
) -> None:
    gang = Gang(many(count), poison, room, announced)
    gang.serve_all()
    assert failed(gang) == poison and (room > 4 or gang.gang_errors <= 8)


def test_recovery_holds_new_streams_back_until_suspects_settle() -> None:
    streams = many(4)
    gang = Gang(streams, {"s0", "s1", "s2", "s3"}, room=64)
    gang.come_back()
    gang.come_back()
    recovery, late = gang.recovery, stream("late")
    assert [s.name for s in recovery.begin(streams)] == ["s0", "s1"]
    assert not recovery.on_arrival(late)
    assert recovery.on_settled("s0") == []
    assert [s.name for s in recovery.on_settled("s1")] == ["s2"]
    streams[3].ended = True
    assert not recovery.on_arrival(stream("later")) and recovery.on_settled("nobody") == []
    assert [s.name for s in recovery.on_settled("s2")] == ["late", "later"]
    assert recovery.on_arrival(stream("latest"))


def test_recovery_resumes_suspects_after_started_streams_progress() -> None:
    good, bad, worse, waits = streams = [stream(name) for name in ("good", "bad", "worse", "waits")]
    gang = Gang(streams, {"bad", "worse"}, room=3)
    gang.live([good], steps=2)
    gang.come_back()
    gang.come_back()
    gang.recovery._suspects.remove(good)  # as if it had had a token before the last loss
    assert gang.recovery.begin(streams) == [good]
    assert gang.recovery.on_settled("somebody else") == []
    assert gang.recovery.on_settled("good") == [bad]
    assert gang.recovery.on_settled("bad") == [worse]
    assert gang.recovery.on_settled("worse") == [waits]


def test_decode_step_resets_the_fruitless_resume_count_of_a_stream() -> None:
    s = stream()
    for _ in range(3):
        s.submission()
        s.admitted = True
        s.on_incarnation_lost(drafted_per_tree=3)
    assert (s.fruitless_resumes, s.submissions_without_progress) == (2, 3)
    s.submission()
    s.record(output(1))
    assert (s.fruitless_resumes, s.submissions_without_progress) == (2, 3), "its prompt alone does not"
    s.record(output(1))
    s.on_incarnation_lost(drafted_per_tree=3)
    assert (s.fruitless_resumes, s.submissions_without_progress, s.in_fatal_step) == (0, 0, False)


def test_seeds_fill_only_requests_without_a_seed() -> None:
    own = Request("a", (1,), RequestParams(seed=5))
    assert Seeds(0).fill(own) is own
    given = [Seeds(3).fill(Request("a", (1,))).params.seed for _ in range(2)]
    assert given[0] is not None and given[0] == given[1]
