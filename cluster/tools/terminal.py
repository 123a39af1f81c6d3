"""What commands need of a terminal: colours where they are wanted, and lines that are redrawn in place."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Literal, TextIO

Colour = Literal["dim", "red", "green", "cyan", "magenta"]
CODES: dict[Colour, int] = {"dim": 2, "red": 31, "green": 32, "cyan": 36, "magenta": 35}
# A model may write anything. Control characters would move the cursor or set the title; they are shown as pictures.
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
PICTURES |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


class Screen:
    """Where a command writes. What is no terminal gets the text as it is, without colours.

    Colours are off as well where `NO_COLOR` is set (https://no-color.org) or `TERM` is "dumb".
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        self.is_terminal = self.out.isatty()
        self._colours = self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._drawn = 0

    def write(self, text: str, colour: Colour | None = None) -> None:
        """Write text of unknown origin at once."""
        if text:
            self.out.write(self.painted(text.translate(PICTURES) if self.is_terminal else text, colour))
            self.out.flush()

    def line(self, text: str, colour: Colour | None = None) -> None:
        """Write a line."""
        self.write(text, colour)
        self.write("\n")

    def painted(self, text: str, colour: Colour | None) -> str:
        """The text in a colour, where there are colours."""
        if colour is None or not self._colours:
            return text
        return f"\x1b[{CODES[colour]}m{text}\x1b[0m"

    def redraw(self, lines: Sequence[tuple[str, Colour | None]]) -> None:
        """Show lines in the place of those of the last call; where that cannot be done, below them."""
        if not self.is_terminal:
            self.out.write("".join(f"{text}\n" for text, _ in lines) + "\n")
            self.out.flush()
            return
        width, height = shutil.get_terminal_size()
        shown = list(lines)[: height - 1]  # a line that wraps or scrolls could not be redrawn in place
        up = f"\x1b[{min(self._drawn, height - 1)}A" if self._drawn else ""
        cut = "".join(
            f"{self.painted(text.translate(PICTURES)[: width - 1], colour)}\x1b[K\n" for text, colour in shown
        )
        self.out.write(f"{up}{cut}\x1b[J")
        self.out.flush()
        self._drawn = len(shown)
