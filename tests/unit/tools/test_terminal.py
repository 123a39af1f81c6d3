"""Colours, control characters and redrawing on a terminal, and the deferral of Ctrl-C."""

import io
import os
import shutil
import signal

import pytest

from cluster.offline.interrupts import defer_interrupt
from cluster.tools.terminal import Screen


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def screen_output(out: io.StringIO, text: str = "hello") -> str:
    Screen(out).write(text, "cyan")
    return out.getvalue()


def test_colours_follow_terminal_type_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert screen_output(Tty()) == "\x1b[36mhello\x1b[0m"
    assert screen_output(io.StringIO()) == "hello"
    monkeypatch.setenv("NO_COLOR", "")
    assert screen_output(Tty()) == "\x1b[36mhello\x1b[0m", "an empty NO_COLOR counts as unset"
    monkeypatch.setenv("NO_COLOR", "1")
    assert screen_output(Tty()) == "hello"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert screen_output(Tty()) == "hello"


def test_control_characters_are_escaped_on_a_terminal() -> None:
    control_text = "a\x1b]0;title\x07\r\x9b2J\x7f\tb\n"
    assert screen_output(Tty(), control_text) == "\x1b[36ma\u241b]0;title\u2407\u240d\ufffd2J\u2421\tb\n\x1b[0m"
    assert screen_output(io.StringIO(), control_text) == control_text, "a pipe gets the unchanged text"


def terminal_rows(frames: str, height: int) -> list[str]:
    """The rows that a terminal of `height` rows shows after `frames`. The frames move the cursor up and erase to the
    end of the line and of the screen.
    """
    rows, at, remaining = [""], 0, frames
    while remaining:
        if remaining.startswith("\x1b["):
            end = next(i for i, c in enumerate(remaining) if c.isalpha())
            code, number, remaining = remaining[end], remaining[2:end], remaining[end + 1 :]
            if code == "A":
                at -= int(number)
                assert at >= 0 and len(rows) - at <= height, "the cursor is above the screen"
            elif code == "J":
                rows = [*rows[:at], ""]  # the cursor is at the start of its line
        elif remaining[0] == "\n":
            at, remaining = at + 1, remaining[1:]
            rows += [""] if at == len(rows) else []
        else:
            end = next(i for i, c in enumerate(remaining) if c in "\x1b\n")
            rows[at], remaining = remaining[:end], remaining[end:]  # every line here is followed by an erase
    return rows


def test_redraw_replaces_the_previous_lines_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((10, 4)))
    out = Tty()
    screen = Screen(out)
    for lines in (["one", "two", "three"], ["a line that is too long", "four"], [str(i) for i in range(9)], ["last"]):
        screen.redraw([(line, None) for line in lines])
        cut = [line[:9] for line in lines][:3]
        assert terminal_rows(out.getvalue(), 4) == [*cut, ""]


def test_redraw_without_a_terminal_appends_each_table() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.redraw([("one", "red")])
    screen.redraw([("two", None)])
    assert out.getvalue() == "one\n\ntwo\n\n"


def test_first_interrupt_is_deferred_and_second_is_raised() -> None:
    original_handler = signal.default_int_handler
    signal.signal(signal.SIGINT, original_handler)  # a process in the background ignores SIGINT
    with pytest.raises(KeyboardInterrupt), defer_interrupt() as interrupt:
        assert not interrupt.pressed
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second SIGINT raised nothing")
    assert signal.getsignal(signal.SIGINT) is original_handler
