"""Small random checkpoints in the published formats. Each is made once per test session."""

import atexit
import json
import tempfile
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

OUTPUTS = {1: [2], 3: [0, 1, 2]}
BOUNDARIES = {2: [0, 4], 4: [0, 1, 3, 4], 5: [0, 1, 2, 3, 4]}
"""The aux layers of a draft for a target of 4 layers, by the number of aux layers.

`OUTPUTS` are written into `eagle_config`; they count the outputs of layers. `BOUNDARIES` are written at the top level
of the config; they count the boundaries between layers.
"""


@cache
def folder_of_session() -> Path:
    """Return a temporary folder that is removed when the process exits."""
    folder = tempfile.TemporaryDirectory(prefix="aerie-tiny-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def target_folder(**options: object) -> str:
    """Return the folder of `tiny_target` with these options. It is made on the first call."""
    return tiny_target(folder_of_session() / f"target-{target_folder.cache_info().misses}", **options)  # type: ignore[arg-type]


@cache
def draft_folder(target: str, **options: object) -> str:
    """Return the folder of `tiny_draft` with these options. It is made on the first call."""
    return tiny_draft(folder_of_session() / f"draft-{draft_folder.cache_info().misses}", target, **options)  # type: ignore[arg-type]


def tiny_target(
    folder: Path,
    *,
    vocab_size: int = 64,
    hidden: int = 32,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    tied: bool = False,
    seed: int = 0,
    max_position: int = 512,
    llama3: bool = False,
    biases: bool = False,
    spread: float = 1.0,
    **extra: object,
) -> str:
    """Write a random Llama target in float32 and return its folder. Its greedy texts do not repeat a single token.

    `spread` is the scale of the LM head: with a smaller value the distribution is flatter.
    """
    torch.manual_seed(seed)
    if llama3:
        extra["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tied,
        attention_bias=biases,
        mlp_bias=biases,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "lm_head" in name:
                parameter.normal_(0, spread)
            else:
                parameter.normal_(0, 1.0 if "embed" in name else 0.35)
    model.save_pretrained(folder)
    return str(folder)


def tiny_draft(
    folder: Path,
    target: str,
    *,
    num_aux: int = 3,
    layers: int = 1,
    hidden: int | None = None,
    intermediate: int | None = None,
    draft_vocab: int | None = None,
    seed: int = 1,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    use_aux: bool = True,
    own_head: bool = True,
    biases: bool = False,
    theta: float = 10000.0,
) -> str:
    """Write a random EAGLE-3 draft for `target` and return its folder.

    Its tensors have SpecForge's names. `OUTPUTS` and `BOUNDARIES` give its aux layers.
    """
    target_config = json.loads((Path(target) / "config.json").read_text())
    target_width, vocab = target_config["hidden_size"], target_config["vocab_size"]
    h, heads, kv_heads, d = hidden or target_width, 4, 2, 8
    vocab_d, mlp_size = draft_vocab or vocab, intermediate or 2 * h
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def scale(size: int) -> Tensor:
        return 1 + random(size)

    tensors: dict[str, Tensor] = {"norm.weight": scale(h)}
    if own_head:
        tensors["lm_head.weight"] = random(vocab_d, h)
    if use_aux:
        tensors["fc.weight"] = random(h, num_aux * target_width)
        if norm_before_fc:
            tensors["input_norm.weight"] = scale(num_aux * target_width)
        if fc_norm:
            tensors |= {f"fc_norm.{i}.weight": scale(target_width) for i in range(num_aux)}
    if h != target_width:
        tensors["embed_tokens.weight"] = random(vocab, h)
    for i in range(layers):
        name, columns = ("midlayer", 2 * h) if i == 0 else (f"layers.{i}", h)
        projections = (
            ("self_attn.q", heads * d, columns),
            ("self_attn.k", kv_heads * d, columns),
            ("self_attn.v", kv_heads * d, columns),
            ("self_attn.o", h, heads * d),
            ("mlp.gate", mlp_size, h),
            ("mlp.up", mlp_size, h),
            ("mlp.down", h, mlp_size),
        )
        for module, rows, cols in projections:
            tensors[f"{name}.{module}_proj.weight"] = random(rows, cols)
            if biases:
                tensors[f"{name}.{module}_proj.bias"] = random(rows)
        norms = ["input_layernorm", "post_attention_layernorm"] + (["hidden_norm"] if i == 0 and use_aux else [])
        tensors |= {f"{name}.{module}.weight": scale(h) for module in norms}
    if vocab_d != vocab:
        ids = torch.randperm(vocab, generator=generator)[:vocab_d].sort().values
        tensors["d2t"] = ids - torch.arange(vocab_d)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    eagle_config: dict[str, object] = {"use_aux_hidden_state": use_aux}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": h,
        "intermediate_size": mlp_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": d,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "attention_bias": biases,
        "mlp_bias": biases,
        "vocab_size": vocab,
        "draft_vocab_size": vocab_d,
        "target_hidden_size": target_width,
        "norm_output": norm_output,
        "norm_before_residual": norm_before_residual,
        "eagle_config": eagle_config,
    }
    if use_aux:
        config["num_aux_hidden_states"] = num_aux
        if num_aux in OUTPUTS:
            eagle_config["eagle_aux_hidden_state_layer_ids"] = OUTPUTS[num_aux]
        else:
            config["eagle_aux_hidden_state_layer_ids"] = BOUNDARIES[num_aux]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@cache
def letters_folder() -> str:
    """Return the folder of a tokenizer whose ids 0 to 25 are the letters a to z."""
    letters = {chr(97 + i): i for i in range(26)}
    tokenizer = Tokenizer(BPE(vocab=letters, merges=[]))
    tokenizer.decoder = ByteLevel()
    folder = folder_of_session() / "letters"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)
