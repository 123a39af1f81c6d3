"""Show the progress of running streams: redrawn lines on a terminal, one plain line every 2 s elsewhere."""

import shutil
import time
from typing import TextIO

from cluster.bench.streams import ClientStream, accept_length, total_tokens_per_second
from cluster.tools.terminal import Screen

BAR_WIDTH = 12
NAME_WIDTH = 28
MAX_WIDTH = 120
LINE_INTERVAL_S = 2.0


class LiveView:
    """Shows the progress of streams. On a terminal with enough lines, every call redraws a title, one line per stream,
    and one for the total. Elsewhere, calls print one line for the total, at most every 2 s and at the end.
    """

    def __init__(self, title: str, max_tokens: int, out: TextIO | None = None) -> None:
        self._title, self._max_tokens, self._screen = title, max_tokens, Screen(out)
        self._printed_at = time.monotonic()
        self._printed_end = False

    def __call__(self, streams: list[ClientStream]) -> None:
        """Show the streams as they are now."""
        size = shutil.get_terminal_size()
        if self._screen.is_terminal and len(streams) + 3 <= size.lines:
            lines = [self._line(stream, min(MAX_WIDTH, size.columns - 1)) for stream in streams]
            self._screen.redraw([(line, None) for line in (self._title, *lines, self._total(streams))])
            return
        all_ended = all(stream.ended_at is not None for stream in streams)
        now = time.monotonic()
        if (all_ended and not self._printed_end) or now - self._printed_at >= LINE_INTERVAL_S:
            self._printed_at, self._printed_end = now, all_ended
            self._screen.line(f"{self._title}: {self._total(streams)}")

    def _line(self, stream: ClientStream, width: int) -> str:
        token_count = len(stream.token_ids)
        filled_width = BAR_WIDTH * token_count // self._max_tokens
        bar = "#" * filled_width + "." * (BAR_WIDTH - filled_width)
        head = (
            f"  {last_line(stream.prompt.text, NAME_WIDTH):{NAME_WIDTH}} {bar} {token_count:4d} "
            f"{stream.tokens_per_second:6.1f}/s  "
        )
        tail = "".join(c if " " <= c <= "~" else "?" for c in stream.text[-200:].replace("\n", " \\n "))
        tail_width = max(1, width - len(head))
        return head + (stream.error or tail)[-tail_width:]

    def _total(self, streams: list[ClientStream]) -> str:
        tokens = sum(len(stream.token_ids) for stream in streams)
        ended_streams = [stream for stream in streams if stream.ended_at is not None]
        seconds = max(stream.seconds for stream in streams)
        speed = (
            total_tokens_per_second(streams)
            if len(ended_streams) == len(streams)
            else tokens / seconds
            if seconds
            else 0.0
        )
        mean_accept_length = accept_length(ended_streams)
        accept_text = f", accept length {mean_accept_length:.2f}" if mean_accept_length else ""
        return (
            f"{len(ended_streams)} of {len(streams)} streams done, {tokens} tokens, {speed:.1f} tokens/s{accept_text}"
        )


def last_line(text: str, width: int) -> str:
    """Return the last non-blank line of a text, cut to `width` characters; "" if all lines are blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    line = lines[-1]
    return line if len(line) <= width else line[: width - 3] + "..."
