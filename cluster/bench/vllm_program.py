"""A program that generates with vLLM. It runs in vLLM's own virtual environment, so it imports nothing of this package.

Its argument is JSON: the arguments of `vllm.LLM`. Each input line has `prompts` (lists of token ids), `new_tokens` and
`temperature`. The first output line says that the model is loaded. Each later line answers an input line with the
seconds, the tokens, and how many drafts and accepted draft tokens vLLM has counted since its start. vLLM's worker
processes import this file before they begin, so `repair` runs in them too if the variable `AERIE_REPAIR` is set.
"""

import json
import os
import sys
import time
from typing import Any

REPAIR_VARIABLE = "AERIE_REPAIR"
COUNTER_NAMES = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}


def repair() -> None:
    """Repair the rejection sampler of vLLM's CPU build, which loses the temperatures (vLLM 0.32, issue 55005).

    A function that replaces a Triton kernel there writes the temperatures into a copy and drops the copy. So above
    temperature 0, logits are divided by uninitialised memory, and almost no draft token is accepted. Do nothing if this
    vLLM has no such replacements.
    """
    try:
        from vllm.utils import cpu_triton_utils
    except ImportError:
        return
    import torch

    def expand(output: Any, values: Any, cumulative_counts: Any, *replacement: Any, **sizes: Any) -> None:
        old_value, new_value = replacement[:2]
        counts = torch.diff(cumulative_counts, prepend=cumulative_counts.new_zeros(1))
        output.copy_(torch.where(values == old_value, new_value, values).repeat_interleave(counts))

    cpu_triton_utils._expand_kernel_impl = expand


def main() -> None:
    """Load the model, write the line `{"ready": true}`, and answer requests until the input ends."""
    responses = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's prints go to stderr, so that they do not mix with the answers
    from vllm import LLM, SamplingParams

    model = LLM(**json.loads(sys.argv[1]))
    responses.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        limits = {"max_tokens": request["new_tokens"], "ignore_eos": True, "detokenize": False}
        params = [
            SamplingParams(temperature=request["temperature"], seed=i, **limits) for i in range(len(request["prompts"]))
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        started_at = time.perf_counter()
        outputs = model.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started_at
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        counts = {
            COUNTER_NAMES[metric.name]: metric.value for metric in model.get_metrics() if metric.name in COUNTER_NAMES
        }
        responses.write(json.dumps({"seconds": seconds, "tokens": tokens, **counts}) + "\n")


if REPAIR_VARIABLE in os.environ:
    repair()

if __name__ == "__main__":
    main()
