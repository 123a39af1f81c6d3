"""Terminal output of the commands: colours if the terminal allows them, and lines that are redrawn in place."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Literal, TextIO

Colour = Literal["dim", "red", "green", "cyan", "magenta"]
COLOUR_CODES: dict[Colour, int] = {"dim": 2, "red": 31, "green": 32, "cyan": 36, "magenta": 35}
# A model may write control characters, which would move the cursor or set the title. A terminal gets Unicode's control
# pictures (from U+2400) in their place; the C1 range has no pictures and becomes U+FFFD.
CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
CONTROL_PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


class Screen:
    """The output of a command. A file or a pipe gets the text unchanged, without colours.

    Colours are also off if `NO_COLOR` is set (https://no-color.org) or `TERM` is "dumb".
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        self.is_terminal = self.out.isatty()
        self._colours = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._drawn_lines = 0

    def write(self, text: str, colour: Colour | None = None) -> None:
        """Write text and flush. On a terminal, control characters in the text are shown as visible characters."""
        if text:
            self.out.write(self.coloured(text.translate(CONTROL_PICTURES) if self.is_terminal else text, colour))
            self.out.flush()

    def line(self, text: str, colour: Colour | None = None) -> None:
        """Write `text` and a line end."""
        self.write(text, colour)
        self.write("\n")

    def coloured(self, text: str, colour: Colour | None) -> str:
        """Return the text in a colour, or unchanged if colours are off."""
        if colour is None or not self._colours:
            return text
        return f"\x1b[{COLOUR_CODES[colour]}m{text}\x1b[0m"

    def redraw(self, lines: Sequence[tuple[str, Colour | None]]) -> None:
        """Replace the lines of the last call with `lines`. If the output is not a terminal, append `lines` instead."""
        if not self.is_terminal:
            self.out.write("".join(f"{text}\n" for text, _ in lines) + "\n")
            self.out.flush()
            return
        width, height = shutil.get_terminal_size()
        visible_lines = list(lines)[: height - 1]  # a line that wraps or scrolls could not be redrawn in place
        cursor_up = f"\x1b[{min(self._drawn_lines, height - 1)}A" if self._drawn_lines else ""
        rendered = "".join(
            f"{self.coloured(text.translate(CONTROL_PICTURES)[: width - 1], colour)}\x1b[K\n"
            for text, colour in visible_lines
        )
        self.out.write(f"{cursor_up}{rendered}\x1b[J")
        self.out.flush()
        self._drawn_lines = len(visible_lines)
