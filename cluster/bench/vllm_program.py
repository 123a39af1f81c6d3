"""Run by the Python of vLLM's own virtual environment, so it imports nothing of this package: generates on demand.

Its argument is JSON for `vllm.LLM`. Each line in has `prompts` (lists of token ids), `new_tokens` and a `temperature`;
each line out says how long that took, and which tokens came.
"""

import json
import os
import sys
import time


def main() -> None:
    """Load the model, say so, and answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints must not come between answers
    from vllm import LLM, SamplingParams

    model = LLM(**json.loads(sys.argv[1]))
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        limits = {"max_tokens": asked["new_tokens"], "ignore_eos": True, "detokenize": False}
        params = [
            SamplingParams(temperature=asked["temperature"], seed=i, **limits) for i in range(len(asked["prompts"]))
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        began = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
