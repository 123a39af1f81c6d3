"""Colours, control characters, redrawing, and Ctrl-C on hold."""

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


def written(out: io.StringIO, text: str = "hello") -> str:
    Screen(out).write(text, "cyan")
    return out.getvalue()


def test_colours_follow_terminal_type_and_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(Tty()) == "\x1b[36mhello\x1b[0m"
    assert written(io.StringIO()) == "hello"
    monkeypatch.setenv("NO_COLOR", "")
    assert written(Tty()) == "\x1b[36mhello\x1b[0m", "an empty NO_COLOR is none"
    monkeypatch.setenv("NO_COLOR", "1")
    assert written(Tty()) == "hello"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert written(Tty()) == "hello"


def test_control_characters_are_escaped_on_a_terminal() -> None:
    evil = "a\x1b]0;title\x07\r\x9b2J\x7f\tb\n"
    assert written(Tty(), evil) == "\x1b[36ma\u241b]0;title\u2407\u240d\ufffd2J\u2421\tb\n\x1b[0m"
    assert written(io.StringIO(), evil) == evil, "a pipe gets the text itself"


def shows(frames: str, height: int) -> list[str]:
    """What a terminal shows after `frames`, which use cursor up, erase to the end of the line and of the screen."""
    rows, at, left = [""], 0, frames
    while left:
        if left.startswith("\x1b["):
            end = next(i for i, c in enumerate(left) if c.isalpha())
            code, number, left = left[end], left[2:end], left[end + 1 :]
            if code == "A":
                at -= int(number)
                assert at >= 0 and len(rows) - at <= height, "above the screen"
            elif code == "J":
                rows = [*rows[:at], ""]  # the cursor is at the start of its line
        elif left[0] == "\n":
            at, left = at + 1, left[1:]
            rows += [""] if at == len(rows) else []
        else:
            end = next(i for i, c in enumerate(left) if c in "\x1b\n")
            rows[at], left = left[:end], left[end:]  # every line here is followed by an erase
    return rows


def test_redraw_replaces_the_previous_lines_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((10, 4)))
    out = Tty()
    screen = Screen(out)
    for lines in (["one", "two", "three"], ["a line that is too long", "four"], [str(i) for i in range(9)], ["last"]):
        screen.redraw([(line, None) for line in lines])
        cut = [line[:9] for line in lines][:3]
        assert shows(out.getvalue(), 4) == [*cut, ""]


def test_redraw_without_a_terminal_appends_each_table() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.redraw([("one", "red")])
    screen.redraw([("two", None)])
    assert out.getvalue() == "one\n\ntwo\n\n"


def test_first_interrupt_is_deferred_and_second_is_raised() -> None:
    before = signal.default_int_handler
    signal.signal(signal.SIGINT, before)  # it is ignored where the tests run in the background
    with pytest.raises(KeyboardInterrupt), defer_interrupt() as held:
        assert not held.pressed
        signal.raise_signal(signal.SIGINT)
        assert held.pressed
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not raised")
    assert signal.getsignal(signal.SIGINT) is before
