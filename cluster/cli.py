"""The `aerie` command: a table of subcommands. Only the chosen subcommand's module is imported.

So `aerie generate` never imports Ray, and `aerie serve` never imports the trainer. A subcommand is a module with
`add_arguments(parser)` and `run(args) -> int`.
"""

import argparse
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from cluster import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("cluster.tools.generate", "generate text with the engine alone, without Ray"),
    "chat": ("cluster.tools.chat", "talk to a model, here or behind a server, and see what each step accepted"),
    "serve": ("cluster.api.launch.serve", "serve a model over REST on a local or running Ray cluster"),
    "keys": ("cluster.api.launch.keys", "make, list and remove the API keys of a server"),
    "status": ("cluster.tools.status", "watch a server: its ranks, speed, speculation, queue and restarts"),
    "inspect": ("cluster.tools.inspect", "say what a checkpoint is and whether it can be served, from its headers"),
    "export-draft": ("cluster.tools.export_draft", "write an EAGLE-3 draft in another tool's format"),
    "probe-draft": ("cluster.tools.probe_draft", "measure which interpretation of a draft is accepted most"),
    "sample-draft": ("cluster.tools.sample_draft", "record the output of a good draft, for later loads to check"),
    "train": ("cluster.train.command", "train the demo target and its draft"),
    "bench": ("cluster.bench.command", "measure speed and acceptance"),
    "demo": ("cluster.bench.cases.demo", "serve the demo pair, stream eight prompts, show what speculation gained"),
}
STOPPED_BY_SIGNALS = ("serve",)  # run until SIGINT or SIGTERM, and then exit with status 0
BAD_INPUT = 2
READER_LEFT = 128 + signal.SIGPIPE  # the status that a shell reports for a program ended by `| head`
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; 2 with a message on stderr if a setting or value is refused.

    If the reader of stdout exits early, as `head` does, the command ends without a traceback.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)  # a failure at the interpreter's exit would print a traceback
    except BrokenPipeError:
        if not _reader_left():
            raise
        return READER_LEFT


def _run(words: list[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="aerie", description="LLM serving on Ray with EAGLE tree speculation.")
    parser.add_argument("--version", action="version", version=f"aerie {__version__}")
    table = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = None
    for name, (module_name, text) in COMMANDS.items():
        sub = table.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            with _ends_well() if name in STOPPED_BY_SIGNALS else nullcontext():
                module = importlib.import_module(module_name)
            module.add_arguments(sub)
            run = module.run
    args = parser.parse_args(words)
    assert run is not None, "argparse refuses unknown commands"
    try:
        return int(run(args))
    except ValueError as error:
        print(f"aerie {args.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED


@contextmanager
def _ends_well() -> Iterator[None]:
    """Exit with status 0 at SIGINT or SIGTERM inside the block: the command does so itself once it is imported."""
    if threading.current_thread() is not threading.main_thread():  # in tests: only the main thread sets handlers
        yield
        return
    before = {number: signal.signal(number, lambda *_: os._exit(0)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reader_left() -> bool:
    """Return whether stdout has lost its reader. If so, redirect it to /dev/null, so that a later flush cannot fail."""
    out = sys.stdout.fileno()
    poll = select.poll()
    poll.register(out, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return True


if __name__ == "__main__":
    sys.exit(main())
