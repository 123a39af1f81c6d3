"""How a stream remembers what it was sent, and in which order streams come back."""

import random

from cluster.actors.messages import Loss
from cluster.actors.streams import Recovery, Stream, end_culprits, with_seed
from cluster.request import Request, RequestOutput, SamplingParams, SpeculationCounts

LOSS = Loss(1, "died", 7, "target", "the process died", 0, 0.0, 0.1)


def stream(name: str = "s", resumed: int = 0) -> Stream:
    prompt = tuple(range(1, 6 + resumed))
    return Stream(Request(name, prompt, SamplingParams(max_tokens=50, seed=9), resumed, 1))


def output(*tokens: int, **more: object) -> RequestOutput:
    return RequestOutput("s", tokens, **more)  # type: ignore[arg-type]


def test_a_stream_is_submitted_again_with_what_it_was_sent() -> None:
    s = stream(resumed=2)
    assert s.submission() == s.request
    s.take(output(10))
    s.take(output(11, 12))
    s.lose(nodes=3)
    again = s.submission()
    assert again.prompt_token_ids == (1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
    assert again.resumed_tokens == 5
    assert (again.params, again.routed_dp_rank, again.request_id) == (s.request.params, 1, "s")


def test_the_counts_of_all_lives_add_up() -> None:
    s = stream()
    s.submission()
    for tokens in ((1,), (2, 3), (4,), (5, 6, 7)):  # the first ends the prompt
        s.take(output(*tokens))
    s.lose(nodes=3)
    s.submission()
    s.take(output(8))
    last = s.take(output(9, 10, finish_reason="length", speculation=SpeculationCounts(5, 15, (1, 4, 0, 0))))
    assert last.speculation == SpeculationCounts(8, 24, (2, 5, 1, 0))


def test_without_speculation_there_is_nothing_to_add() -> None:
    s = stream()
    s.submission()
    s.take(output(1))
    s.take(output(2))
    s.lose(nodes=0)
    assert s.take(output(finish_reason="stop")).speculation is None


def test_cached_tokens_stay_those_of_the_prompt() -> None:
    s = stream()
    s.cached_tokens = 4
    assert s.take(output(1, cached_tokens=4)).cached_tokens == 4
    s.lose(nodes=3)
    assert s.take(output(2, cached_tokens=64)).cached_tokens == 4


def dies(streams: list[Stream]) -> None:
    for s in streams:
        s.lose(nodes=3)


def test_suspects_come_back_one_at_a_time_after_the_others() -> None:
    good, new, poison = stream("good"), stream("new"), stream("poison")
    for s in (good, new, poison):
        s.submission()
    good.take(output(1))
    dies([good, new, poison])
    recovery = Recovery()
    assert recovery.begin([good, new, poison]) == [good]
    assert recovery.settled("somebody else") == []
    assert recovery.settled("good") == [new]
    assert recovery.settled("new") == [poison]
    assert recovery.settled("poison") == []


def test_one_that_left_or_ended_is_passed_over() -> None:
    first, second, third = stream("1"), stream("2"), stream("3")
    for s in (first, second, third):
        s.submission()
    dies([first, second, third])
    recovery = Recovery()
    assert recovery.begin([first, second, third]) == [first]
    second.ended = True
    assert recovery.settled("1") == [third]
    assert recovery.begin([]) == []


def test_who_was_not_submitted_is_no_suspect() -> None:
    waiting = stream()
    waiting.lose(nodes=3)
    assert not waiting.suspect and waiting.fruitless_resumes == 0


def test_the_third_resumption_without_a_token_is_the_last() -> None:
    s = stream()
    s.submission()
    s.take(output(1))
    s.lose(nodes=3)
    for resumes in range(3):
        end_culprits([s], LOSS)
        assert not s.ended, f"ended after {resumes} resumptions"
        s.submission()
        s.lose(nodes=3)
    end_culprits([s], LOSS)
    last = s.queue.get_nowait()
    assert isinstance(last, RequestOutput) and last.finish_reason == "error"
    assert "resumed 3 times" in (last.error or "") and "rank 1 died at step 7" in (last.error or "")


def test_a_token_wipes_the_slate_clean() -> None:
    s = stream()
    for _ in range(3):
        s.submission()
        s.lose(nodes=3)
    s.submission()
    s.take(output(1))
    s.lose(nodes=3)
    assert (s.fruitless_resumes, s.suspect) == (0, False)


def test_every_request_has_a_seed_and_keeps_its_own() -> None:
    own = Request("a", (1,), SamplingParams(seed=5))
    assert with_seed(own, random.Random(0)) is own
    given = [with_seed(Request("a", (1,)), random.Random(3)).params.seed for _ in range(2)]
    assert given[0] is not None and given[0] == given[1]
