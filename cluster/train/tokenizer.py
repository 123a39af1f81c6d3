"""A byte-level BPE tokenizer of 2048 tokens. Line breaks and the indentation after them can form one token.

The tokenizer is saved in the layout that `transformers.AutoTokenizer` loads.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

_PRETOKEN_PATTERN = r"(?:\r?\n)+[ \t]*| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+|\s"

# The model was trained on messages without tools. The template lists tools in a form that many models know. The model
# makes a tool call only if a grammar forces one; its arguments then follow the schema but are meaningless.
CHAT_TEMPLATE = (
    "{#- This model continues Python source and was not trained to call tools: a call comes where one is required. #}"
    "{%- if tools %}"
    "{{ '<|im_start|>system\\n# Tools, one a line; call one as <tool_call>' }}"
    '{{ \'{"name": ..., "arguments": ...}</tool_call>\\n\' }}'
    "{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{%- for call in message['tool_calls'] %}"
    "{{- '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train the tokenizer on texts. Ids 0, 1 and 2 are the three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRETOKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json with the chat template, and special_tokens_map.json.

    The two small files are written in the older layout, which every version of transformers reads.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    special: dict[str, object] = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        **special,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint directory."""
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(directory))
    return loaded
