"""Read the prompts of `prompts.txt` (texts and chats), and encode them as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("prompts.txt")
ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: either a `text` to continue or the `messages` (role, content) of a chat; the other one is empty."""

    name: str
    text: str = ""
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages in the format of OpenAI's API."""
        return [{"role": role, "content": content} for role, content in self.messages]

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Return the prompt's token ids by a `transformers` tokenizer. A chat is formatted by the chat template, with
        the generation prompt.
        """
        if not self.messages:
            return list(tokenizer(self.text)["input_ids"])
        text = tokenizer.apply_chat_template(self.chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def read_prompts(file: Path = FILE) -> list[Prompt]:
    """Read a file of prompts; its first lines describe the format.

    Raises:
        ValueError: a header or a line of a chat is malformed, or a name occurs twice.
    """
    prompts: list[Prompt] = []
    head, lines = "", list[str]()
    for line in [*file.read_text(encoding="utf-8").splitlines(), "=== "]:
        if not line.startswith("=== "):
            lines.append(line)
            continue
        if head:
            prompts.append(_prompt(head, lines))
        head, lines = line.removeprefix("=== "), []
    names = [prompt.name for prompt in prompts]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{file}: more than one prompt is named {', '.join(duplicates)}")
    return prompts


def _prompt(head: str, lines: Sequence[str]) -> Prompt:
    name, _, kind = (part.strip() for part in head.partition("|"))
    text = "\n".join(lines)
    if kind == "chat":
        return Prompt(name, messages=tuple(_message(name, line) for line in lines if line.strip()))
    if kind.startswith("repeat "):
        count = int(kind.removeprefix("repeat "))
        return Prompt(name, "\n".join(text.replace("{n}", str(n)) for n in range(1, count + 1)))
    if kind:
        raise ValueError(f"prompt {name!r}: {kind!r} is neither 'chat' nor 'repeat N'")
    return Prompt(name, text)


def _message(name: str, line: str) -> tuple[str, str]:
    role, colon, content = line.partition(": ")
    if role not in ROLES or not colon:
        raise ValueError(f"prompt {name!r}: {line!r} begins with neither 'user: ' nor 'assistant: '")
    return role, content
