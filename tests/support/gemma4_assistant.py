"""A tiny assistant of Gemma-4, made by `transformers`, and the tokens that it drafts there."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from tests.support.families import VOCAB, FamilyCheckpoint, random_model
from tests.support.float64_transformers import exact
from tests.support.tiny_checkpoints import folder_of_session

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 20,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "max_position_embeddings": 256,
}
"""It has as many KV heads, of the same widths, as the target `gemma4` of the families, and the same window."""
REGISTRY_ROW = (
    "frozen-KV MTP",
    "Gemma-4's assistant, which reads the target's keys and values",
    "Gemma4AssistantForCausalLM of transformers, float64",
    "2",
)
"""The row of docs/models.md: what the draft is, what it is compared with, and on how many ranks it is tested."""
OUTER_KEYS = {"backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k"}


@cache
def assistant(**changes: Any) -> tuple[str, Any]:
    """Return the folder of an assistant, and the model of `transformers`. `changes` are values of its text config, or
    outer values: those with `backbone_hidden_size` and of clusters.
    """
    outer = {key: changes.pop(key) for key in OUTER_KEYS & changes.keys()}
    text = transformers.Gemma4TextConfig(**TEXT | changes)
    config = transformers.Gemma4AssistantConfig(text_config=text, **{"backbone_hidden_size": 32} | outer)
    # All layers of an assistant read the keys and values of the target. transformers 5.23 refuses such a config.
    with patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", ["reuse"] * text.num_hidden_layers):
        model = random_model(transformers.Gemma4AssistantForCausalLM, config, seed=3)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    folder = folder_of_session() / f"assistant-{len(list(folder_of_session().glob('assistant-*')))}"
    with exact():
        model.save_pretrained(folder)
    return str(Path(folder)), model.eval()


def drafted_chain(target: FamilyCheckpoint, model: Any, text: list[int], count: int) -> list[int]:
    """Return the `count` tokens that the assistant of `transformers` drafts after `text`, whose last token the target
    has not read yet. As in `SinglePositionMultiTokenCandidateGenerator`, but no keys of refused tokens are left.
    """
    decoder, embed = target.oracle.model.get_decoder(), target.oracle.model.get_input_embeddings()
    own = [layer.self_attn for layer in decoder.layers if not layer.self_attn.is_kv_shared_layer]
    for attention in {layer.layer_type: layer for layer in own}.values():
        attention.store_full_length_kv = True  # transformers 5.23 forgets this in a target whose layers do not borrow
    drafted: list[int] = []
    with exact(), torch.inference_mode():
        read = decoder(input_ids=torch.tensor([text[:-1]]), use_cache=False, return_shared_kv_states=True)
        hidden, token = read.last_hidden_state[:, -1:], text[-1]
        for _ in range(count):
            inputs = torch.cat([embed(torch.tensor([[token]])), hidden], -1)
            position = torch.tensor([[len(text) - 1]])
            out = model(inputs_embeds=inputs, position_ids=position, shared_kv_states=read.shared_kv_states)
            hidden, token = out.last_hidden_state, int(out.logits.argmax())
            drafted.append(token)
    return drafted
