"""`aerie generate`: one prompt through the engine, without Ray."""

import argparse
import json
import time
from dataclasses import dataclass

from cluster.config import ConfigError, EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.request import Request, RequestOutput, SamplingParams
from cluster.text import StoppedText, TextTokenizer

MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request: all of its tokens, and its last output with the reason and the counts."""

    token_ids: list[int]
    last: RequestOutput


def complete(engine: Engine, requests: list[Request]) -> list[Completion]:
    """Run `requests` together to their end; completions in their order.

    Raises:
        ValueError: a request cannot be served; none is started then.
    """
    for request in requests:
        engine.check(request)
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    last: dict[str, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            last[output.request_id] = output
    return [Completion(tokens[r.request_id], last[r.request_id]) for r in requests]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie generate`."""
    words = (
        parser.add_argument("dir", metavar="DIR", help="folder of the target"),
        parser.add_argument("text", metavar="PROMPT", help="the text to continue"),
    )
    for word in words:  # not nargs="?": a flag between the two would leave the second one without its value
        word.required = False
    parser.add_argument("--model", "--model-path", metavar="DIR", help="another way to give DIR")
    parser.add_argument("--prompt", metavar="TEXT", help="another way to give PROMPT")
    parser.add_argument(
        "--prompt-token-ids", metavar="1,2,3", help="in place of a prompt, for a model without tokenizer"
    )
    parser.add_argument(
        "--draft", metavar="DIR", help="folder of a draft, EAGLE, EAGLE-3 or MTP layers; without it, plain decoding"
    )
    parser.add_argument("--num-steps", type=int, help="depth of the tree")
    parser.add_argument("--topk", type=int, help="children per node")
    parser.add_argument("--num-draft-tokens", type=int, help="nodes of the tree, root included")
    parser.add_argument("--no-speculation", action="store_true", help="ignore --draft")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, help=f"(default: {MAX_TOKENS}, or as many as fit)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float64", "float32", "bfloat16", "float16"])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Generate and print.

    Raises:
        ConfigError: a setting cannot be honoured.
        ValueError: the prompt or a sampling parameter cannot be served.
    """
    model, text = _model_and_text(args)
    settings: dict[str, object] = {"model_path": model, "dtype": args.dtype, "page_size": args.page_size}
    if args.draft and not args.no_speculation:
        settings["speculative_draft_model_path"] = args.draft
        for flag, name in (
            ("num_steps", "speculative_num_steps"),
            ("topk", "speculative_eagle_topk"),
            ("num_draft_tokens", "speculative_num_draft_tokens"),
        ):
            if getattr(args, flag) is not None:
                settings[name] = getattr(args, flag)
    elif not args.draft and any((args.num_steps, args.topk, args.num_draft_tokens)):
        raise ConfigError("--num-steps, --topk and --num-draft-tokens need --draft")
    engine = build_engine(EngineConfig.from_kwargs(settings))
    prompt = _prompt_ids(args, model, text, engine)
    room = engine.info().max_request_tokens - len(prompt)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=max(1, min(MAX_TOKENS, room)) if args.max_tokens is None else args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    started, before = time.perf_counter(), engine.status().steps
    (done,) = complete(engine, [Request("generate", tuple(prompt), params)])
    seconds = time.perf_counter() - started
    counts = done.last.speculation
    said = None if engine.tokenizer is None else _said(engine.tokenizer, prompt, done.token_ids, params.stop)
    result = {
        "text": said,
        "token_ids": done.token_ids,
        "prompt_token_ids": prompt,
        "finish_reason": done.last.finish_reason,
        "accept_length": counts.accept_length if counts else 1.0,
        "steps": engine.status().steps - before,
        "seconds": seconds,
    }
    if args.json:
        print(json.dumps(result))
        return 0
    print(said if said is not None else ",".join(map(str, done.token_ids)))
    print(
        f"[{len(done.token_ids)} tokens in {result['steps']} steps and {seconds:.2f} s, "
        f"accept length {result['accept_length']:.2f}, finished by {done.last.finish_reason}]"
    )
    return 0


def _said(tokenizer: TextTokenizer, prompt: list[int], token_ids: list[int], stops: tuple[str, ...]) -> str:
    """The text of the output, cut as the REST layer cuts it."""
    text = StoppedText(tokenizer, prompt, stops)
    return text.push(token_ids) + text.finish()


def _model_and_text(args: argparse.Namespace) -> tuple[str, str | None]:
    """The target's folder and the prompt's text, each given once, as an argument or as an option.

    Raises:
        ConfigError: one is missing or given twice.
    """
    words = [word for word in (args.dir, args.text) if word is not None]
    if args.model is not None and len(words) == 2:
        raise ConfigError("the model is given twice, as DIR and as --model; give it once")
    model = args.model if args.model is not None else words.pop(0) if words else None
    if model is None:
        raise ConfigError('which model? aerie generate DIR "prompt"; DIR is the folder of a target')
    texts = [*words, *([] if args.prompt is None else [args.prompt])]
    if len(texts) + (args.prompt_token_ids is not None) != 1:
        raise ConfigError('give one prompt: aerie generate DIR "prompt", --prompt or --prompt-token-ids')
    return model, texts[0] if texts else None


def _prompt_ids(args: argparse.Namespace, model: str, text: str | None, engine: Engine) -> list[int]:
    if text is None:
        try:
            return [int(part) for part in args.prompt_token_ids.split(",")]
        except ValueError:
            raise ConfigError(
                f"--prompt-token-ids must be integers joined by commas, got {args.prompt_token_ids!r}"
            ) from None
    if engine.tokenizer is None:
        raise ConfigError(f"a prompt needs a tokenizer and {model!r} has none; use --prompt-token-ids")
    return engine.tokenizer.encode(text)
