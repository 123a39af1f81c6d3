"""How the overload and rudeness benches judge the replies to requests, and how `read_reply` parses a reply."""

import asyncio
import json
from typing import Any

import pytest

from cluster.bench.cases import rude
from cluster.bench.cases.overload import Size, goals, overload_figures, show
from cluster.bench.cases.rude import Listener, Phase, _phase_figures
from cluster.bench.rudeness import AnswerTally
from cluster.bench.streams import ClientStream, Prompt
from cluster.bench.wire import Reply, read_reply

SIZE = Size(seconds=20.0, warmup_s=0.0, max_wait_s=5.0)


def served_reply(at: float, wait: float = 4.0) -> Reply:
    return Reply(at, 200, seconds=wait + 1.0, first_event_s=wait, received_all=True)


def refused_reply(at: float, retry_after_s: int = 4, seconds: float = 0.02, body: bytes = b"{}") -> Reply:
    headers = {"retry-after": str(retry_after_s), "content-type": "application/json"}
    return Reply(at, 503, headers, body, seconds, received_all=True)


def test_good_overload_figures_meet_all_goals() -> None:
    replies = [*(served_reply(float(at)) for at in range(15)), *(refused_reply(at / 2) for at in range(30))]
    result = overload_figures(replies, SIZE, capacity=0.8)
    assert all(goal.is_met(quick=False) for goal in goals(result))
    assert (result["taken"], result["refused"], result["other"]) == (15, 30, 0)
    assert "refusal p99 s" in show({"capacity": 0.8, "offered": 4.0, **result})


@pytest.mark.parametrize(
    ("bad_replies", "goal"),
    [
        ([refused_reply(1.0, seconds=0.5)] * 3, "refusal p99"),
        ([refused_reply(1.0, retry_after_s=1)] * 20, "Retry-After"),
        ([served_reply(1.0, wait=9.0)] * 3, "first token"),
        ([refused_reply(1.0, body=b"no")], "JSON"),
        ([Reply(1.0, 500, seconds=0.1, received_all=True)], "neither"),
        ([Reply(1.0, 200, seconds=0.1, first_event_s=0.1)], "neither"),
    ],
)
def test_each_kind_of_bad_reply_misses_its_goal(bad_replies: list[Reply], goal: str) -> None:
    replies = [
        *(served_reply(float(at)) for at in range(15)),
        *(refused_reply(at / 2) for at in range(30)),
        *bad_replies,
    ]
    [missed] = [
        each_goal
        for each_goal in goals(overload_figures(replies, SIZE, capacity=0.8))
        if not each_goal.is_met(quick=False)
    ]
    assert goal in missed.name


def test_too_little_goodput_misses_its_goal() -> None:
    [missed] = [
        each_goal
        for each_goal in goals(overload_figures([served_reply(1.0), refused_reply(1.0)], SIZE, capacity=0.8))
        if not each_goal.is_met(quick=False)
    ]
    assert missed.name == "goodput of capacity"


def reply_of(raw: bytes) -> Reply:
    async def read() -> Reply:
        reader = asyncio.StreamReader()
        reader.feed_data(raw)
        reader.feed_eof()
        reply = Reply()
        await read_reply(reader, reply)
        return reply

    return asyncio.run(read())


def test_read_reply_parses_json_text_and_event_stream_responses() -> None:
    body = json.dumps({"error": {}}).encode()
    head = f"HTTP/1.1 503 x\r\ncontent-type: application/json\r\nRetry-After: 7\r\ncontent-length: {len(body)}\r\n\r\n"
    reply = reply_of(head.encode() + body)
    assert (reply.status, reply.headers["retry-after"], reply.is_json, reply.received_all) == (503, "7", True, True)
    plain = reply_of(b"HTTP/1.1 500 x\r\ncontent-type: text/plain\r\n\r\nInternal Server Error")
    assert (plain.status, plain.is_json) == (500, False)
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\r\n"
    stream = reply_of(head.encode() + b'data: {"text": "error"}\n\ndata: {"b": 1}\n\ndata: [DONE]\n\n')
    assert (stream.first_event_s is not None, stream.received_all, stream.error_event) == (True, True, "")
    cut = reply_of(head.encode() + b'data: {"error": {}}\n\n')
    assert (cut.received_all, bool(cut.error_event)) == (False, True)
    late = reply_of(head.encode() + b'data: {"text": "a"}\n\ndata: {"error": {}}\n\n')
    assert (late.first_event_s is not None, late.received_all, bool(late.error_event)) == (True, False, True), (
        "read_reply reads the events after the first one too"
    )


def test_rude_phase_fails_for_each_reason() -> None:
    assert not Phase("x", 1, pauses=[0.1, 0.4]).failed
    bad_fields: list[dict[str, Any]] = [{"cut": 1}, {"replaced": True}, {"tally": AnswerTally(not_json=1)}]
    for bad_field in [*bad_fields, {"tally": AnswerTally(unanswered=1)}]:
        assert Phase("x", 1, **bad_field).failed


def test_rude_goal_is_missed_if_a_pause_is_too_long() -> None:
    phases = [
        _phase_figures(Phase(phase_name, 1, 1.0, [pause]))
        for phase_name, pause in (("nothing", 9.0), ("a", 0.4), ("b", 0.6))
    ]
    judged_goals = rude.goals({"phases": phases, "limit_s": rude.MAX_PAUSE_S})
    assert [(goal.name, goal.is_met(quick=False)) for goal in judged_goals] == [
        ("longest pause beside a, s", True),
        ("longest pause beside b, s", False),
    ]


def test_listener_reports_the_longest_pause_between_events_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listener, "_run", lambda self: None)
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    listener = Listener(1, "m", Prompt("x"), 8)
    stream = ClientStream(Prompt("x"), on_event=listener.on_event)
    for at in (1.0, 1.5, 3.5, 3.55):
        now[0] = at
        stream.add_event({"choices": [{"token_ids": [1]}]})
    assert listener.take_pauses() == (pytest.approx(2.0), 2)
    now[0] = 4.55
    assert listener.take_pauses()[0] == pytest.approx(1.0)  # the pause after the last event has not ended
