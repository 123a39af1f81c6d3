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
from cluster.tools.engine_flags import add_engine_arguments, given_engine_flags
from cluster.tools.terminal import Colour, Screen

PROMPT = "> "
STEP_COLOURS: tuple[Colour, Colour] = ("cyan", "magenta")
EXAMPLE_SETTINGS = {"temperature": "0.7", "seed": "7", "max_tokens": "256"}  # the values are examples for the help text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie chat`."""
    parser.add_argument(
        "dir", metavar="MODEL", nargs="?", help=f"a target to run in this process: its folder, or {HUB_NAME}"
    )
    add_server_arguments(parser, None)
    parser.add_argument("--model", metavar="NAME", help="with --url: a name of the model (default: the one it has)")
    parser.add_argument("--system", metavar="TEXT", default="", help="the system message")
    for name, example in EXAMPLE_SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=example, help="as /set in the chat")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Chat until the input ends or the line /exit comes. Return 1 if the server cannot be reached, or if the input is
    not a terminal and one of its lines failed. Otherwise return 0.

    Raises:
        ConfigError: a setting cannot be honoured.
        ValueError: a request field cannot have the given value.
    """
    conversation, screen = Conversation(args.system), Screen()
    for name in EXAMPLE_SETTINGS:
        conversation.set(name, getattr(args, name) or "")
    try:
        answers = _answers(args)
    except NoAnswerError as error:
        print(f"aerie chat: {error}", file=sys.stderr)
        return 1
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 - edits the lines of input()
        screen.line(f"{answers.name}; /help lists commands, Ctrl-D ends", "dim")
    all_succeeded = True
    while (line := _read_line(is_interactive, screen)) not in (None, "/exit"):
        if line.startswith("/"):
            all_succeeded &= _run_command(line, conversation, screen)
        elif line.strip():
            all_succeeded &= _print_answer(line, conversation, answers, screen)
    return 0 if is_interactive or all_succeeded else 1


def _answers(args: argparse.Namespace) -> Answers:
    """Return the server or the local engine that the flags name.

    Raises:
        ConfigError: neither or both of MODEL and --url are given, or a flag is given that only goes with the other one.
        NoAnswerError: the server cannot be reached.
    """
    if (args.dir is None) == (args.url is None):
        raise ConfigError("give either MODEL or --url: aerie chat MODEL, or aerie chat --url http://127.0.0.1:8000")
    if args.url is not None:
        if engine_flags := given_engine_flags(args):
            raise ConfigError(
                f"{engine_flags[0]} is for an engine in this process; with --url, the server has its own settings"
            )
        return ServerAnswers(Client(args.url, args.api_key), args.model)
    if args.model is not None or args.api_key is not None:
        raise ConfigError("--model and --api-key go with --url")
    answers: Answers = importlib.import_module("cluster.tools.engine_answers").engine_answers(args)
    return answers


def _read_line(is_interactive: bool, screen: Screen) -> str | None:
    """Return the next input line, or None at the end of the input. Ctrl-C at a terminal discards the line so far."""
    while True:
        if is_interactive and not screen.is_terminal:
            print(PROMPT, end="", file=sys.stderr, flush=True)
        try:
            return input(PROMPT if is_interactive and screen.is_terminal else "")
        except EOFError:
            if is_interactive:
                screen.line("")
            return None
        except KeyboardInterrupt:
            if not is_interactive:
                raise
            screen.line("")


def _run_command(line: str, conversation: Conversation, screen: Screen) -> bool:
    """Run a slash command and print its result or error; return whether it succeeded."""
    try:
        screen.line(conversation.command(line), "dim")
    except ValueError as error:
        print(f"aerie chat: {error}", file=sys.stderr)
        return False
    return True


@dataclass(slots=True)
class PrintedAnswer:
    """The answer printed so far: its text, and the token count of each step that produced tokens."""

    text: str = ""
    step_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    started_at: float = field(default_factory=time.perf_counter)

    def add(self, part: AnswerPart) -> None:
        """Append the output of the next step."""
        self.text += part.text
        self.step_tokens += [part.tokens] if part.tokens else []
        self.finish_reason = part.finish_reason or self.finish_reason

    def summary(self) -> str:
        """Return one line: tokens, accept length, tokens per second, finish reason."""
        # The first number is from the step that ended the prompt, each later one from a step of decoding, which may
        # have verified no tree.
        tokens, decoded = sum(self.step_tokens), self.step_tokens[1:]
        accept_length_text = f"accept length {sum(decoded) / len(decoded):.2f}, " if decoded else ""
        tokens_per_second = tokens / (time.perf_counter() - self.started_at)
        ending = "stopped" if self.finish_reason is None else f"finished by {self.finish_reason}"
        return f"[{tokens} tokens, {accept_length_text}{tokens_per_second:.1f} tokens/s, {ending}]"


def _print_answer(question: str, conversation: Conversation, answers: Answers, screen: Screen) -> bool:
    """Print the answer while it is generated. Then add question and answer to the conversation and return True; Ctrl-C
    after the first token ends the answer there. Return False if the request failed, or if Ctrl-C came before the first
    token.
    """
    answer = PrintedAnswer()
    try:
        with closing(answers.answer(conversation.body(question))) as parts:
            for part in parts:
                colour = STEP_COLOURS[len(answer.step_tokens) % 2]
                answer.add(part)  # added before it is printed, because Ctrl-C may come between the two lines
                screen.write(part.text, colour)
    except KeyboardInterrupt:
        if not answer.step_tokens:  # otherwise the partial answer is kept
            screen.line("")
            return False
    except ValueError as error:
        screen.write("\n" if answer.text else "")
        print(f"aerie chat: {error}", file=sys.stderr)
        return False
    screen.line("")
    screen.line(answer.summary(), "dim")
    conversation.add_answer(question, answer.text)
    return True
