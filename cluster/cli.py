"""The `aerie` command: a table of subcommands. Only the chosen subcommand's module is imported.

Therefore `aerie generate` never imports Ray, and `aerie serve` never imports the trainer. A subcommand is a module with
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
EXIT_BAD_INPUT = 2
EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE  # the status that a shell reports for a program ended by `| head`
EXIT_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. If a setting or value is refused, the code is 2, and stderr has the
    message.

    If the reader of stdout exits early, as `head` does, the command ends without a traceback.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)  # flush here: a flush that fails at the interpreter's exit prints a traceback
    except BrokenPipeError:
        if not _stdout_closed():
            raise
        return EXIT_BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    command_name = next((word for word in arguments if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="aerie", description="LLM serving on Ray with EAGLE tree speculation.")
    parser.add_argument("--version", action="version", version=f"aerie {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = None
    for name, (module_name, help_text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if name == command_name:
            with _exit_on_signal() if name in STOPPED_BY_SIGNALS else nullcontext():
                module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            run = module.run
    args = parser.parse_args(arguments)
    assert run is not None, "argparse refuses unknown commands"
    try:
        return int(run(args))
    except ValueError as error:
        print(f"aerie {args.command}: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


@contextmanager
def _exit_on_signal() -> Iterator[None]:
    """Inside this block, exit with status 0 at SIGINT or SIGTERM. After the import the command itself handles these
    signals.
    """
    if threading.current_thread() is not threading.main_thread():  # in tests: only the main thread sets handlers
        yield
        return
    previous_handlers = {
        signal_number: signal.signal(signal_number, lambda *_: os._exit(0))
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


def _stdout_closed() -> bool:
    """Return whether stdout has lost its reader. If so, redirect it to /dev/null, so that a later flush cannot fail."""
    stdout_fd = sys.stdout.fileno()
    poll = select.poll()
    poll.register(stdout_fd, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout_fd)
    return True


if __name__ == "__main__":
    sys.exit(main())
