"""`aerie chat`: a conversation in the terminal, with a server or with an engine of this process.

The text of successive steps alternates between two colours, which makes speculation visible. With a server, torch is
not imported.
"""

import argparse
import importlib
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field

from cluster.arch.hub.names import HUB_NAME
from cluster.config import ConfigError
from cluster.tools.answers import AnswerPart, Answers, ServerAnswers
from cluster.tools.client import Client, NoAnswerError, add_server_arguments
from cluster.tools.conversation import Conversation
from cluster.tools.engine_flags import add_engine_arguments, engine_flags_given
from cluster.tools.terminal import Colour, Screen

PROMPT = "> "
COLOURS: tuple[Colour, Colour] = ("cyan", "magenta")
SETTINGS = {"temperature": "0.7", "seed": "7", "max_tokens": "256"}  # the values are examples for the help text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie chat`."""
    parser.add_argument(
        "dir", metavar="MODEL", nargs="?", help=f"a target to run in this process: its folder, or {HUB_NAME}"
    )
    add_server_arguments(parser, None)
    parser.add_argument("--model", metavar="NAME", help="with --url: a name of the model (default: the one it has)")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told first")
    for name, example in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=example, help="as /set in the chat")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends or /exit. Return 1 if the server cannot be reached. Also return 1 if the input is not a
    terminal and a line of it failed. Otherwise return 0.

    Raises:
        ConfigError: a setting cannot be honoured.
        ValueError: a request field cannot have the given value.
    """
    talk, screen = Conversation(args.system), Screen()
    for name in SETTINGS:
        talk.set(name, getattr(args, name) or "")
    try:
        answers = _answers(args)
    except NoAnswerError as error:
        print(f"aerie chat: {error}", file=sys.stderr)
        return 1
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):
            import readline  # noqa: F401 - edits the lines of input()
        screen.line(f"{answers.name}; /help lists commands, Ctrl-D ends", "dim")
    whole = True
    while (line := _line(typed, screen)) not in (None, "/exit"):
        if line.startswith("/"):
            whole &= _obey(line, talk, screen)
        elif line.strip():
            whole &= _ask(line, talk, answers, screen)
    return 0 if typed or whole else 1


def _answers(args: argparse.Namespace) -> Answers:
    """Return the server or the local engine that the flags name.

    Raises:
        ConfigError: neither or both of MODEL and --url are given, or a flag does not go with the given one.
        NoAnswerError: the server cannot be reached.
    """
    if (args.dir is None) == (args.url is None):
        raise ConfigError("who shall answer? aerie chat MODEL, or aerie chat --url http://127.0.0.1:8000")
    if args.url is not None:
        if given := engine_flags_given(args):
            raise ConfigError(f"{given[0]} is for an engine here; with --url, the server has its own settings")
        return ServerAnswers(Client(args.url, args.api_key), args.model)
    if args.model is not None or args.api_key is not None:
        raise ConfigError("--model and --api-key go with --url")
    answers: Answers = importlib.import_module("cluster.tools.engine_answers").engine_answers(args)
    return answers


def _line(typed: bool, screen: Screen) -> str | None:
    """Return the next input line, or None at the end of the input. Ctrl-C at a terminal discards the line."""
    while True:
        if typed and not screen.is_terminal:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            return input(PROMPT if typed and screen.is_terminal else "")
        except EOFError:
            if typed:
                screen.line("")
            return None
        except KeyboardInterrupt:
            if not typed:
                raise
            screen.line("")


def _obey(line: str, talk: Conversation, screen: Screen) -> bool:
    """Run a slash command and print its result or error; return whether it succeeded."""
    try:
        screen.line(talk.command(line), "dim")
    except ValueError as error:
        print(f"aerie chat: {error}", file=sys.stderr)
        return False
    return True


@dataclass(slots=True)
class PrintedAnswer:
    """The answer printed so far: its text, and the token count of each step that produced tokens."""

    text: str = ""
    runs: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    began: float = field(default_factory=time.perf_counter)

    def add(self, run: AnswerPart) -> None:
        """Append the output of the next step."""
        self.text += run.text
        self.runs += [run.tokens] if run.tokens else []
        self.finish_reason = run.finish_reason or self.finish_reason

    def summary(self) -> str:
        """Return one line: tokens, accept length, tokens per second, finish reason."""
        tokens, trees = sum(self.runs), self.runs[1:]  # the first run comes from prefill, each later one from a tree
        length = f"accept length {sum(trees) / len(trees):.2f}, " if trees else ""
        pace = tokens / (time.perf_counter() - self.began)
        end = "stopped" if self.finish_reason is None else f"finished by {self.finish_reason}"
        return f"[{tokens} tokens, {length}{pace:.1f} tokens/s, {end}]"


def _ask(question: str, talk: Conversation, answers: Answers, screen: Screen) -> bool:
    """Print the answer as it streams. If there is one, add question and answer to the conversation and return True."""
    answer = PrintedAnswer()
    try:
        with closing(answers.answer(talk.body(question))) as runs:
            for run in runs:
                colour = COLOURS[len(answer.runs) % 2]
                answer.add(run)  # added before it is shown, because Ctrl-C may come between the two
                screen.write(run.text, colour)
    except KeyboardInterrupt:
        if not answer.runs:  # otherwise the partial answer is kept
            screen.line("")
            return False
    except ValueError as error:
        screen.write("\n" if answer.text else "")
        print(f"aerie chat: {error}", file=sys.stderr)
        return False
    screen.line("")
    screen.line(answer.summary(), "dim")
    talk.answered(question, answer.text)
    return True
