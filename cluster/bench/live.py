"""Progress of running streams: redrawn lines on a terminal, one plain line every 2 s elsewhere."""

import shutil
import time
from typing import TextIO

from cluster.bench.streams import ClientStream, accept_length, pace
from cluster.tools.terminal import Screen

BAR = 12
NAME = 28
WIDEST = 120
PLAIN_EVERY_S = 2.0


class LiveView:
    """Draws one line per stream and one for the total; on a terminal, every call redraws them."""

    def __init__(self, title: str, max_tokens: int, out: TextIO | None = None) -> None:
        self._title, self._max_tokens, self._screen = title, max_tokens, Screen(out)
        self._told = time.monotonic()
        self._said_end = False

    def __call__(self, streams: list[ClientStream]) -> None:
        """Show the streams as they are now."""
        size = shutil.get_terminal_size()
        if self._screen.is_terminal and len(streams) + 3 <= size.lines:
            lines = [self._line(stream, min(WIDEST, size.columns - 1)) for stream in streams]
            self._screen.redraw([(line, None) for line in (self._title, *lines, self._total(streams))])
            return
        ended = all(stream.ended is not None for stream in streams)
        now = time.monotonic()
        if (ended and not self._said_end) or now - self._told >= PLAIN_EVERY_S:
            self._told, self._said_end = now, ended
            self._screen.line(f"{self._title}: {self._total(streams)}")

    def _line(self, stream: ClientStream, width: int) -> str:
        done = len(stream.token_ids)
        filled = BAR * done // self._max_tokens
        bar = "#" * filled + "." * (BAR - filled)
        head = f"  {short(stream.prompt.text, NAME):{NAME}} {bar} {done:4d} {stream.tokens_per_second:6.1f}/s  "
        tail = "".join(c if " " <= c <= "~" else "?" for c in stream.text[-200:].replace("\n", " \\n "))
        room = max(1, width - len(head))
        return head + (stream.error or tail)[-room:]

    def _total(self, streams: list[ClientStream]) -> str:
        tokens = sum(len(stream.token_ids) for stream in streams)
        ended = [stream for stream in streams if stream.ended is not None]
        seconds = max(stream.seconds for stream in streams)
        speed = pace(streams) if len(ended) == len(streams) else tokens / seconds if seconds else 0.0
        accepted = accept_length(ended)
        length = f", accept length {accepted:.2f}" if accepted else ""
        return f"{len(ended)} of {len(streams)} streams done, {tokens} tokens, {speed:.1f} tokens/s{length}"


def short(text: str, width: int) -> str:
    """Return the last non-blank line of a text, cut to `width` characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = lines[-1]
    return line if len(line) <= width else line[: width - 3] + "..."
