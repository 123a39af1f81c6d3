"""`aerie generate`: run one prompt through an engine without Ray, and print the text of each step."""

import argparse
import json
import sys
import time
from itertools import chain

from cluster.arch.hub.names import HUB_NAME
from cluster.config import ConfigError, EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.offline.stepping import steps
from cluster.request import Request, RequestParams, SequenceOutput, signed_seed
from cluster.tokenizer.stop_strings import StoppedText
from cluster.tools.engine_flags import add_engine_arguments, engine_settings
from cluster.tools.terminal import Screen

MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie generate`."""
    positionals = (
        parser.add_argument("dir", metavar="MODEL", help=f"the target: its folder, or {HUB_NAME}"),
        parser.add_argument("text", metavar="PROMPT", help="the text to continue"),
    )
    # Both are optional. With nargs="?" instead, a flag between the two would leave the second one without its value.
    for positional in positionals:
        positional.required = False
    parser.add_argument("--model", "--model-path", metavar="MODEL", help="another way to give MODEL")
    parser.add_argument("--prompt", metavar="TEXT", help="another way to give PROMPT")
    parser.add_argument(
        "--prompt-token-ids", metavar="1,2,3", help="in place of a prompt, for a model without tokenizer"
    )
    add_engine_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="64 bits, of either sign (default: 0)")
    parser.add_argument("--max-tokens", type=int, help=f"(default: {MAX_TOKENS}, or as many as fit)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Generate, and print the output of each step. Return 1 if the request failed while it ran, else 0.

    Raises:
        ConfigError: a setting cannot be honoured.
        ValueError: the prompt or a sampling parameter cannot be served.
    """
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {args.max_tokens}")
    model, text = _model_and_text(args)
    engine = build_engine(EngineConfig.from_kwargs(engine_settings(args, model)))
    prompt = _prompt_ids(args, model, text, engine)
    max_new_tokens = engine.info().max_request_tokens - len(prompt)
    params = RequestParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=signed_seed(args.seed),
        max_tokens=max(1, min(MAX_TOKENS, max_new_tokens)) if args.max_tokens is None else args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    text_stream = None if engine.tokenizer is None else StoppedText(engine.tokenizer, prompt, params.stop)
    screen, printed_text, ids, last_output = Screen(), "", list[int](), SequenceOutput("generate", ())
    started_at, steps_before = time.perf_counter(), engine.status().steps
    for output in chain.from_iterable(steps(engine, [Request("generate", tuple(prompt), params)])):
        new_text = _new_ids(output, bool(ids)) if text_stream is None else _new_text(output, text_stream)
        printed_text += new_text
        ids += output.token_ids
        last_output = output
        if not args.json:
            screen.write(new_text)
    seconds, speculation = time.perf_counter() - started_at, last_output.speculation
    result = {
        "text": None if text_stream is None else printed_text,
        "token_ids": ids,
        "prompt_token_ids": prompt,
        "finish_reason": last_output.finish_reason,
        "accept_length": speculation.accept_length if speculation else 1.0,
        "steps": engine.status().steps - steps_before,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"\n[{len(ids)} tokens in {result['steps']} steps and {seconds:.2f} s, "
            f"accept length {result['accept_length']:.2f}, finished by {last_output.finish_reason}]"
        )
    if last_output.error is not None:
        print(f"aerie generate: {last_output.error}", file=sys.stderr)
    return 0 if last_output.error is None else 1


def _new_text(output: SequenceOutput, text_stream: StoppedText) -> str:
    """Return the text that one output adds. As in the REST API, stop strings are left out, and incomplete characters
    are held back until more tokens complete them.
    """
    new_text = text_stream.push(text_stream.visible_token_ids(output))
    return new_text if output.finish_reason is None else new_text + text_stream.finish()


def _new_ids(output: SequenceOutput, has_printed: bool) -> str:
    """Return the token ids of one output, joined by commas. If ids were printed before, a comma comes first."""
    return "".join(f",{token}" for token in output.token_ids).removeprefix("" if has_printed else ",")


def _model_and_text(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return the target (a folder or a name on a hub), and the prompt's text or None if --prompt-token-ids is given.

    Raises:
        ConfigError: the model or the prompt is missing or given twice.
    """
    positionals = [positional for positional in (args.dir, args.text) if positional is not None]
    if args.model is not None and len(positionals) == 2:
        raise ConfigError("the model is given twice, as MODEL and as --model; give it once")
    model = args.model if args.model is not None else positionals.pop(0) if positionals else None
    if model is None:
        raise ConfigError('no model is given: aerie generate MODEL "prompt"; MODEL is a folder or a name on a hub')
    texts = [*positionals, *([] if args.prompt is None else [args.prompt])]
    if len(texts) + (args.prompt_token_ids is not None) != 1:
        raise ConfigError('give one prompt: aerie generate MODEL "prompt", --prompt or --prompt-token-ids')
    return model, texts[0] if texts else None


def _prompt_ids(args: argparse.Namespace, model: str, text: str | None, engine: Engine) -> list[int]:
    if text is None:
        try:
            return [int(token) for token in args.prompt_token_ids.split(",")]
        except ValueError:
            raise ConfigError(
                f"--prompt-token-ids must be integers joined by commas, got {args.prompt_token_ids!r}"
            ) from None
    if engine.tokenizer is None:
        raise ConfigError(f"a prompt needs a tokenizer and {model!r} has none; use --prompt-token-ids")
    return engine.tokenizer.encode(text)
