"""`aerie sample-draft`: run a draft on a few tokens and write its output, the sample, into its folder. Whenever the
draft is loaded later, its output is compared with the sample.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.arch.draft.sample import SAMPLE_FILE, Sample
from cluster.arch.keys import check_folder
from cluster.config import ConfigError, EngineConfig
from cluster.engine.build import build_engine
from cluster.spec.inputs import EagleDraftInput
from cluster.tools.engine_flags import add_override_argument, parse_overrides

SAMPLE_TOKENS = 24
CLEAR_LOGPROB = math.log(0.55)  # a probability above one half, with a margin for rounding
SAMPLE_TEXT = "def walk(path):\n    for name in sorted(os.listdir(path)):\n        yield os.path.join(path, name)\n" * 2


def pair_settings(draft: str, target: str, algorithm: str | None) -> dict[str, object]:
    """Return the engine settings that name a target, its draft and the speculative algorithm."""
    return {
        "model_path": target,
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": draft,
        "speculative_mode": "fixed",  # so that accept lengths are those of equal trees
    }


def sample_draft(
    draft: str, target: str, algorithm: str | None, dtype: str = "float32", overrides: dict[str, Any] | None = None
) -> list[int]:
    """Write `draft_sample.json` into the folder `draft`; return the tokens of the sample. Call this only if `target`
    and `overrides` are known to be right for this draft. Every later load compares the draft's output with the sample,
    so a sample that was made with wrong settings would hide that they are wrong.

    Raises:
        ConfigError: `draft` is not a folder, a sample exists already, or the pair cannot be served.
    """
    check_folder(draft)
    file = Path(draft) / SAMPLE_FILE
    if file.exists():
        raise ConfigError(f"{str(file)!r} exists already; remove it to write another one")
    settings = pair_settings(draft, target, algorithm) | {
        "max_running_requests": 1,
        "context_length": 4 * SAMPLE_TOKENS,
        "dtype": dtype,
        "speculative_draft_overrides": overrides or {},
    }
    engine = build_engine(EngineConfig.from_kwargs(settings))
    if engine.tokenizer is None:
        tokens = [i % engine.info().vocab_size for i in range(1, SAMPLE_TOKENS + 1)]
    else:
        tokens = engine.tokenizer.encode(SAMPLE_TEXT)[:SAMPLE_TOKENS]
    sample = clearest_sample(engine.sample_draft, tokens)
    file.write_text(json.dumps(sample._asdict()) + "\n", encoding="utf-8")
    return list(sample.tokens)


def clearest_sample(sample_draft: Callable[[tuple[int, ...]], EagleDraftInput], tokens: Sequence[int]) -> Sample:
    """Return the draft's output after the longest prefix of `tokens` (more than half of them) after which the draft's
    likeliest next token is clear. A token is clear if its log-probability is above `CLEAR_LOGPROB`: with another
    machine's rounding it is then still the likeliest. If no prefix has a clear next token, use the prefix whose next
    token has the highest probability.
    """
    best: Sample | None = None
    for prefix_length in range(len(tokens), len(tokens) // 2, -1):
        draft_input = sample_draft(tuple(tokens[:prefix_length]))
        sample = Sample(
            tokens=tuple(tokens[:prefix_length]),
            hidden=tuple(float(f"{number:.7g}") for number in draft_input.hidden[0].tolist()),
            token=int(draft_input.topk_index[0, 0]),
            logprob=float(draft_input.topk_logprobs[0, 0]),
        )
        if best is None or sample.logprob > best.logprob:
            best = sample
        if best.logprob > CLEAR_LOGPROB:
            break
    assert best is not None, "no tokens"
    return best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `aerie sample-draft`."""
    parser.add_argument("draft", metavar="DRAFT", help="folder of a draft that is known to be right")
    parser.add_argument("--target", required=True, metavar="MODEL", help="its target: a folder or a name on a hub")
    parser.add_argument("--algorithm", help="its speculative_algorithm (default: what its folder holds)")
    parser.add_argument("--dtype", default="float32", help="of the computation (default: float32)")
    add_override_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Write the sample and print the path of its file."""
    overrides = parse_overrides(args.draft_override)
    tokens = sample_draft(args.draft, args.target, args.algorithm, args.dtype, overrides)
    print(f"{Path(args.draft) / SAMPLE_FILE}: the output of {args.draft} after {len(tokens)} tokens of {args.target}")
    return 0
