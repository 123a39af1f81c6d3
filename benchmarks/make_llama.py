"""Write a Llama with random weights, of any size: for trying how the server behaves with a model of a real one's size.

    python benchmarks/make_llama.py /tmp/llama-1b
    python benchmarks/make_llama.py /tmp/llama-small --hidden 512 --layers 4 --heads 8 --kv-heads 2 --intermediate 1408

The default has one billion parameters, 4 GB in float32. The tokenizer is that of `--tokenizer`, the demo's unless told
otherwise, so that text can be served; what comes out is noise.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo" / "target"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPREAD = 0.02  # of the weights, as a model is initialised


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Write a Llama with random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--vocab", type=int, help="rows of the embedding; at least, and by default, the tokenizer's")
    parser.add_argument("--max-position", type=int, default=8192)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--tokenizer", type=Path, default=DEMO, help="folder of a model whose tokenizer is taken")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> dict[str, object]:
    """The config.json; special tokens are those of the tokenizer's model."""
    given = json.loads((args.tokenizer / "config.json").read_text())
    if args.hidden % args.heads or args.heads % args.kv_heads:
        raise SystemExit("--heads must divide --hidden, and --kv-heads must divide --heads")
    if args.vocab is not None and args.vocab < given["vocab_size"]:
        raise SystemExit(f"--vocab must be at least the tokenizer's {given['vocab_size']}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": args.max_position,
        "vocab_size": args.vocab or given["vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": args.dtype,
        **{name: given.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def tensors_of(config: dict[str, object], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of one layer's tensors."""
    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(d, int)
    q, kv = config["num_attention_heads"], config["num_key_value_heads"]
    assert isinstance(q, int) and isinstance(kv, int)
    name = f"model.layers.{layer}"
    for part, shape in (
        ("q", (q * d, hidden)),
        ("k", (kv * d, hidden)),
        ("v", (kv * d, hidden)),
        ("o", (hidden, q * d)),
    ):
        yield f"{name}.self_attn.{part}_proj.weight", shape
    for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"{name}.mlp.{part}_proj.weight", shape
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.{norm}.weight", (hidden,)


def main() -> None:
    """Write the folder, one file per layer, and say how large the model is."""
    args = arguments()
    config, dtype = config_of(args), DTYPES[args.dtype]
    args.folder.mkdir(parents=True, exist_ok=True)
    dice = torch.Generator().manual_seed(args.seed)
    hidden, vocab = args.hidden, config["vocab_size"]
    assert isinstance(vocab, int)
    ends = [
        ("model.embed_tokens.weight", (vocab, hidden)),
        ("model.norm.weight", (hidden,)),
        ("lm_head.weight", (vocab, hidden)),
    ]
    files = [ends, *(list(tensors_of(config, layer)) for layer in range(args.layers))]
    places: dict[str, str] = {}
    parameters = 0
    for number, shapes in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        made = {}
        for name, shape in shapes:
            random = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=dice) * SPREAD
            made[name], places[name] = random.to(dtype), file
            parameters += random.numel()
        save_file(made, args.folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": parameters * dtype.itemsize}, "weight_map": places}
    (args.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (args.folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in TOKENIZER_FILES:
        if (args.tokenizer / name).is_file():
            shutil.copyfile(args.tokenizer / name, args.folder / name)
    print(f"{args.folder}: {parameters:,} parameters, {parameters * dtype.itemsize / 1e9:.2f} GB of {args.dtype}")


if __name__ == "__main__":
    main()
