"""Score a file of texts offline: how likely the model finds each, and which of two labels it would give.

    python examples/batch_scoring.py models/demo/target texts.txt --draft models/demo/draft

The file has one text per line; empty lines are skipped. The output has one JSON object per line, in the same order.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from cluster import LLM, SamplingParams, StructuredOutputsParams

LABELS = ["code", "prose"]


def main() -> int:
    """Print a line for each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on a hub")
    parser.add_argument("texts", type=Path, help="a file with one text a line")
    parser.add_argument("--draft", help="a draft for the labels; scores need none")
    args = parser.parse_args()
    texts = [line for line in args.texts.read_text(encoding="utf-8").splitlines() if line.strip()]

    # With max_tokens 0 a request ends where its prompt does: only the prompt is scored.
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    label = SamplingParams(max_tokens=8, temperature=0, structured_outputs=StructuredOutputsParams(choice=LABELS))
    with LLM(args.model, draft=args.draft) as llm:
        scored = llm.generate(texts, score)
        labelled = llm.generate([f"{text}\n# The line above is " for text in texts], label)

    for text, output, labels in zip(texts, scored, labelled, strict=True):
        # The first token has nothing before it, so it has no probability.
        pairs = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        logprobs = [found[token].logprob for token, found in pairs if found is not None]
        perplexity = math.exp(-sum(logprobs) / len(logprobs)) if logprobs else None
        line = {"text": text, "tokens": len(output.prompt_token_ids), "perplexity": perplexity, "label": labels.text}
        print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
