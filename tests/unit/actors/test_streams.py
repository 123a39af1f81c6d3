"""Open streams: what a stream records of its outputs, and in which order streams are submitted after a loss."""

from dataclasses import replace

import pytest

from cluster.actors.messages import Loss
from cluster.actors.streams import MAX_FRUITLESS_RESUMES, OpenStream, Recovery
from cluster.request import Request, RequestParams, Seeds, SequenceOutput, SpeculationCounts, TokenLogprob

pytestmark = pytest.mark.timeout(60)  # a fault in the choice of suspects makes a loop that never ends and takes memory

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
    resubmission = s.submission()
    assert resubmission.prompt_token_ids == (1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
    assert resubmission.resumed_tokens == 5
    assert (resubmission.params, resubmission.routed_dp_rank, resubmission.request_id) == (s.request.params, 1, "s")


def test_stream_reports_prompt_logprobs_only_once_across_restarts() -> None:
    """Prompt logprobs come with the first token. Before it, each incarnation gets the original request; after it, the
    resubmitted request asks for no prompt logprobs.
    """
    s = stream()
    s.request = replace(s.request, params=replace(s.request.params, prompt_logprobs=2))
    assert s.submission() == s.request
    s.on_incarnation_lost(drafted_per_tree=3)
    assert s.submission() == s.request
    prompt_logprob = TokenLogprob(2, -0.5, ((2, -0.5),), 1)
    assert s.record(output(10, prompt_logprobs=(prompt_logprob,))).prompt_logprobs == (prompt_logprob,)
    s.on_incarnation_lost(drafted_per_tree=3)
    resubmission = s.submission()
    assert resubmission.params == replace(s.request.params, prompt_logprobs=None)
    assert resubmission.prompt_token_ids == (*s.request.prompt_token_ids, 10)


def test_stream_sums_speculation_counts_of_all_incarnations() -> None:
    s = stream()
    s.submission()
    for tokens in ((1,), (2, 3), (4,), (5, 6, 7)):  # the first output ends the prompt
        s.record(output(*tokens))
    s.on_incarnation_lost(drafted_per_tree=3)
    s.submission()
    for tokens in ((8,), (9, 10)):
        s.record(output(*tokens))
    s.on_incarnation_lost(drafted_per_tree=3)
    s.submission()
    s.record(output(11))
    last = s.record(output(12, 13, finish_reason="length", speculation=SpeculationCounts(5, 15, (1, 4, 0, 0))))
    assert last.speculation == SpeculationCounts(9, 27, (2, 6, 1, 0)), "each tree must count once"


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


class FakeGang:
    """A simulated gang that runs at most `max_running` streams at a time and reports to streams and recovery as a
    router does. A stream of `poison_names` kills the gang in the step of its prompt, or with `fails_late` in the next
    step. Without `reports_admission` no stream is marked as admitted.
    """

    def __init__(
        self,
        streams: list[OpenStream],
        poison_names: set[str],
        max_running: int,
        reports_admission: bool = True,
        fails_late: bool = False,
    ) -> None:
        self.streams, self.poison_names, self.max_running, self.reports_admission, self.fails_late = (
            streams,
            poison_names,
            max_running,
            reports_admission,
            fails_late,
        )
        self.recovery = Recovery()
        self.submitted_names: list[list[str]] = []  # per incarnation: the first batch, in order
        self.gang_errors, self.length = 0, 5

    def open(self) -> list[OpenStream]:
        return [s for s in self.streams if not s.ended]

    def run_incarnation(self, batch: list[OpenStream], steps: int | None = None) -> None:
        """Run an incarnation that starts with `batch`. It ends at a step with a poison stream, after `steps` steps, or
        when no stream is left.
        """
        queue: list[OpenStream] = []
        running: list[OpenStream] = []
        self.submitted_names.append([s.name for s in batch])
        while (queue or running or batch) and (steps is None or steps > 0):
            for s in batch:
                s.submission()
            queue, batch = queue + batch, []
            while queue and len(running) < self.max_running:
                running.append(queue.pop(0))
                running[-1].admitted = self.reports_admission
            if any(s.name in self.poison_names and s.has_first_token >= self.fails_late for s in running):
                steps = 0
                break
            for s in running:
                had_progress, s.started = s.made_progress, True
                s.record(output(1, finish_reason="length" if len(s.sent_tokens) == self.length - 1 else None))
                if (s.made_progress and not had_progress) or s.ended:
                    batch += self.recovery.on_settled(s.name)
            running = [s for s in running if not s.ended]
            steps = None if steps is None else steps - 1
        if steps is not None:
            self.lose_incarnation()

    def lose_incarnation(self) -> None:
        self.gang_errors += 1
        for s in self.open():
            s.on_incarnation_lost(drafted_per_tree=3)
        self.recovery.on_loss(self.open(), LOSS)

    def restart(self, steps: int | None = None) -> None:
        self.run_incarnation(self.recovery.begin(self.open()), steps)

    def serve_all(self) -> None:
        while self.open():
            assert self.gang_errors < 40, "the gang is lost again and again"
            self.restart()


def make_streams(count: int, prefix: str = "s") -> list[OpenStream]:
    return [stream(f"{prefix}{i}") for i in range(count)]


def failed_names(gang: FakeGang) -> set[str]:
    last_outputs = {s.name: s.queue.get_nowait() for s in gang.streams if not s.queue.empty()}
    assert all(
        isinstance(output, SequenceOutput) and output.finish_reason == "error" for output in last_outputs.values()
    )
    return set(last_outputs)


def test_recovery_resubmits_all_streams_at_once_and_started_streams_first() -> None:
    gang = FakeGang(make_streams(116), set(), max_running=16)
    gang.streams[100].started = True  # in an earlier incarnation
    for _ in range(2):
        gang.restart(steps=2)
        assert not any(s.in_fatal_step for s in gang.streams)
    gang.serve_all()
    all_names, running_names = [f"s{i}" for i in range(116)], [f"s{i}" for i in range(15)] + ["s100"]
    assert gang.submitted_names[0] == ["s100", *(name for name in all_names if name != "s100")]
    assert (
        gang.submitted_names[1]
        == gang.submitted_names[2]
        == running_names + [name for name in all_names if name not in running_names]
    )
    assert (
        sorted(name for submitted in gang.submitted_names[2:] for name in submitted) == sorted(all_names)
        and failed_names(gang) == set()
    )


def test_only_streams_in_the_fatal_step_are_suspects() -> None:
    waiting, in_prompt, decoding = stream("waits"), stream("works"), stream("had")
    for s in (waiting, in_prompt, decoding):
        s.submission()
    in_prompt.admitted = decoding.admitted = True
    in_prompt.record(output(1))
    for _ in range(2):
        decoding.record(output(1))
    for s in (waiting, in_prompt, decoding):
        s.on_incarnation_lost(drafted_per_tree=3)
    assert [s.in_fatal_step for s in (waiting, in_prompt, decoding)] == [False, True, False]
    unsubmitted = stream()
    unsubmitted.on_incarnation_lost(drafted_per_tree=3)
    assert not unsubmitted.in_fatal_step and unsubmitted.fruitless_resumes == 0


def test_single_poison_stream_ends_after_three_resumptions_and_others_finish() -> None:
    gang = FakeGang([*make_streams(6), stream("poison")], set(), max_running=16)
    gang.streams[-1].ended = True
    gang.restart(steps=2)  # the other streams get tokens before the poison stream comes
    gang.streams[-1].ended, gang.poison_names = False, {"poison"}
    gang.restart()
    gang.serve_all()
    assert failed_names(gang) == {"poison"} and gang.gang_errors == 1 + 4


@pytest.mark.parametrize("fails_late", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 33])
@pytest.mark.parametrize("position", [0, 0.5, 0.99])
def test_recovery_bisects_suspects_and_ends_only_the_poison_stream(
    count: int, position: float, fails_late: bool
) -> None:
    """With `fails_late` the poison stream gets one token in each incarnation, and is still at fault."""
    streams = make_streams(count)
    poison = streams[int(count * position)].name
    gang = FakeGang(streams, {poison}, max_running=64, fails_late=fails_late)
    gang.length = 40 if fails_late else 5
    gang.serve_all()
    assert failed_names(gang) == {poison}
    # Losses: the first, its repetition, one per halving, and one per fruitless resumption of the last suspect.
    assert gang.gang_errors <= 2 + count.bit_length() + MAX_FRUITLESS_RESUMES
    assert all(len(s.sent_tokens) == gang.length for s in streams if s.name != poison)


@pytest.mark.parametrize(
    ("count", "poison_names", "max_running", "reports_admission"),
    [(12, {"s3", "s9"}, 64, True), (60, {"s57"}, 4, True), (9, {"s4"}, 64, False)],
    ids=["two poison streams", "poison at the end of a long queue", "admission is never reported"],
)
def test_recovery_ends_every_poison_stream_and_no_other_stream(
    count: int, poison_names: set[str], max_running: int, reports_admission: bool
) -> None:
    gang = FakeGang(make_streams(count), poison_names, max_running, reports_admission)
    gang.serve_all()
    assert failed_names(gang) == poison_names and (max_running > 4 or gang.gang_errors <= 8)


def test_recovery_holds_new_streams_back_until_suspects_settle() -> None:
    streams = make_streams(4)
    gang = FakeGang(streams, {"s0", "s1", "s2", "s3"}, max_running=64)
    gang.restart()
    gang.restart()
    recovery, late_stream = gang.recovery, stream("late")
    assert [s.name for s in recovery.begin(streams)] == ["s0", "s1"]
    assert not recovery.on_arrival(late_stream)
    assert recovery.on_settled("s0") == []
    assert [s.name for s in recovery.on_settled("s1")] == ["s2"]
    streams[3].ended = True
    assert not recovery.on_arrival(stream("later")) and recovery.on_settled("nobody") == []
    assert [s.name for s in recovery.on_settled("s2")] == ["late", "later"]
    assert recovery.on_arrival(stream("latest"))


def test_recovery_resumes_suspects_after_started_streams_progress() -> None:
    healthy, first_poison, second_poison, waiting = streams = [
        stream(name) for name in ("good", "bad", "worse", "waits")
    ]
    gang = FakeGang(streams, {"bad", "worse"}, max_running=3)
    gang.run_incarnation([healthy], steps=2)
    gang.restart()
    gang.restart()
    gang.recovery._suspects.remove(healthy)  # as if this stream had gone on before the last loss
    assert gang.recovery.begin(streams) == [healthy]
    assert gang.recovery.on_settled("somebody else") == []
    assert gang.recovery.on_settled("good") == [first_poison]
    assert gang.recovery.on_settled("bad") == [second_poison]
    assert gang.recovery.on_settled("worse") == [waiting]


def test_decode_step_resets_the_fruitless_resume_count_of_a_stream() -> None:
    s = stream()
    for _ in range(3):
        s.submission()
        s.admitted = True
        s.on_incarnation_lost(drafted_per_tree=3)
    assert (s.fruitless_resumes, s.submissions_without_progress) == (2, 3)
    s.submission()
    s.record(output(1))
    assert (s.fruitless_resumes, s.submissions_without_progress) == (2, 3), "a first token is no progress"
    s.record(output(1))
    s.on_incarnation_lost(drafted_per_tree=3)
    assert (s.fruitless_resumes, s.submissions_without_progress, s.in_fatal_step) == (0, 0, False)


def test_seeds_fill_only_requests_without_a_seed() -> None:
    request_with_seed = Request("a", (1,), RequestParams(seed=5))
    assert Seeds(0).fill(request_with_seed) is request_with_seed
    filled_seeds = [Seeds(3).fill(Request("a", (1,))).params.seed for _ in range(2)]
    assert filled_seeds[0] is not None and filled_seeds[0] == filled_seeds[1]
