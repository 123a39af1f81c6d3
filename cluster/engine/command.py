"""`aerie generate`: one prompt through the engine, without Ray."""

import argparse
import json
import time
from dataclasses import dataclass

from cluster.config import ConfigError, EngineConfig
from cluster.engine.build import build_engine
from cluster.engine.engine import Engine
from cluster.request import Request, RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished request: its tokens, why it ended, and what it took."""

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
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the target")
    parser.add_argument("--draft", metavar="DIR", help="folder of the EAGLE-3 draft; without it, plain decoding")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument(
        "--prompt-token-ids", metavar="1,2,3", help="in place of --prompt, for a model without tokenizer"
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
    parser.add_argument("--max-tokens", type=int, default=128)
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
    settings: dict[str, object] = {"model_path": args.model, "dtype": args.dtype, "page_size": args.page_size}
    if args.draft and not args.no_speculation:
        settings["speculative_algorithm"] = "EAGLE3"
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
    prompt = _prompt(args, engine)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    started, before = time.perf_counter(), engine.status().steps
    (done,) = complete(engine, [Request("generate", tuple(prompt), params)])
    seconds = time.perf_counter() - started
    counts = done.last.speculation
    text = engine.tokenizer.decode(done.token_ids) if engine.tokenizer else None
    if text is not None and isinstance(done.last.stop_reason, str):
        text = text[: text.find(done.last.stop_reason)]
    result = {
        "text": text,
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
    print(text if text is not None else ",".join(map(str, done.token_ids)))
    print(
        f"[{len(done.token_ids)} tokens in {result['steps']} steps and {seconds:.2f} s, "
        f"accept length {result['accept_length']:.2f}, finished by {done.last.finish_reason}]"
    )
    return 0


def _prompt(args: argparse.Namespace, engine: Engine) -> list[int]:
    if args.prompt_token_ids is not None:
        try:
            return [int(part) for part in args.prompt_token_ids.split(",")]
        except ValueError:
            raise ConfigError(
                f"--prompt-token-ids must be integers joined by commas, got {args.prompt_token_ids!r}"
            ) from None
    if engine.tokenizer is None:
        raise ConfigError(f"--prompt needs a tokenizer and {args.model!r} has none; use --prompt-token-ids")
    return engine.tokenizer.encode(args.prompt)
