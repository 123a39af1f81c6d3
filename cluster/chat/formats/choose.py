"""Chooses a model's chat format by the parser settings, which also accept the names of vLLM and SGLang. A setting that
is not given is chosen from the model's chat template and tokenizer.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from cluster.chat.formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from cluster.chat.formats.glm import GLM
from cluster.chat.formats.harmony import HARMONY
from cluster.chat.formats.hermes import HERMES
from cluster.chat.formats.llama3 import LLAMA3
from cluster.chat.formats.mistral import ARGS, CALLS, MISTRAL, MISTRAL_LIST
from cluster.chat.formats.plan import THINK_MARKS, ChatFormat, MarkedFormat
from cluster.chat.formats.qwen3_coder import QWEN3_CODER
from cluster.config import ConfigError

NONE = "none"
FORMATS: dict[str, ChatFormat] = {
    format.name: format
    for format in (HERMES, QWEN3_CODER, LLAMA3, MISTRAL, MISTRAL_LIST, DEEPSEEK_V3, DEEPSEEK_V31, GLM, HARMONY)
}
# Parser names of vLLM and SGLang.
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "glm": "glm45",
    "glm47": "glm45",
    "openai": "gpt-oss",
    "gpt_oss": "gpt-oss",
    "harmony": "gpt-oss",
}
THINKING_MARKS = {"think": THINK_MARKS, "mistral": MISTRAL.thinking}
REASONING_ALIASES = {
    **dict.fromkeys(("qwen3", "qwen3-thinking", "deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3"), "think"),
    **dict.fromkeys(("deepseek-v31", "deepseek_v31", "glm45", "hermes", "step3", "nano_v3", "nemotron_3"), "think"),
    **dict.fromkeys(("openai_gptoss", "gpt_oss", "harmony"), "gpt-oss"),
    "magistral": "mistral",
}
TOOL_NAMES = (NONE, *FORMATS)
REASONING_NAMES = (NONE, *THINKING_MARKS, HARMONY.name)


@dataclass(frozen=True, slots=True)
class ChosenFormat:
    """The chat format of a model. `format` is None if answers are plain text. `call_format` and `reasoning_format` name
    the formats of calls and of reasoning; they are `NONE` if there is no such format.
    """

    format: ChatFormat | None
    call_format: str = NONE
    reasoning_format: str = NONE


def canonical_parser_names(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str | None, str | None]:
    """Return the two settings as names of this server. None and auto become None, so that `choose` looks at the model.

    Raises:
        ConfigError: a name is unknown, or the two settings exclude each other.
    """
    call_format = _canonical_name("tool_call_parser", tool_call_parser, TOOL_ALIASES, TOOL_NAMES)
    reasoning_format = _canonical_name("reasoning_parser", reasoning_parser, REASONING_ALIASES, REASONING_NAMES)
    if HARMONY.name in (call_format, reasoning_format) and not {call_format, reasoning_format} <= {HARMONY.name, None}:
        raise ConfigError(
            f"tool_call_parser {call_format!r} and reasoning_parser {reasoning_format!r} do not go together: "
            f"{HARMONY.name} reads both"
        )
    return call_format, reasoning_format


def _canonical_name(setting: str, name: str | None, aliases: dict[str, str], known: Collection[str]) -> str | None:
    if name is None or name == "auto":
        return None
    canonical = aliases.get(name, name)
    if canonical not in known:
        listed = ", ".join(["auto", *known, *(alias for alias in aliases if alias not in known)])
        raise ConfigError(f"{setting} {name!r} is not known; known are {listed}")
    return canonical


def choose(
    template: str, tokens: Collection[str], model_type: str, settings: tuple[str | None, str | None]
) -> ChosenFormat:
    """Return the format of a model. `template` is its chat template, or "" if it has none; `tokens` are its added
    tokens; `model_type` is from its config. `settings` are the results of `canonical_parser_names`: a name is used as
    it is, and None is replaced by what the template and the tokens suggest.
    """
    call_format, reasoning_format = settings
    call_format_name = call_format or (
        _detect_call_format(template, tokens, model_type) if reasoning_format != HARMONY.name else HARMONY.name
    )
    if call_format_name == HARMONY.name:
        return ChosenFormat(HARMONY, HARMONY.name, HARMONY.name)
    reasoning_name = reasoning_format or _detect_reasoning_format(template, tokens)
    base = FORMATS.get(call_format_name)
    if base is None:
        if reasoning_name == NONE:
            return ChosenFormat(None)
        base = MarkedFormat(NONE)
    assert isinstance(base, MarkedFormat)
    thinking = THINKING_MARKS.get(reasoning_name)
    special_tokens = base.special_tokens if thinking is None else (*base.special_tokens, thinking.begin, thinking.end)
    return ChosenFormat(
        replace(base, thinking=thinking, special_tokens=tuple(dict.fromkeys(special_tokens))),
        call_format_name,
        reasoning_name,
    )


def _detect_call_format(template: str, tokens: Collection[str], model_type: str) -> str:
    """Return the name of the format of calls: the name of the first of the `checks` that is true, or `NONE`. The result
    is also `NONE` if the model has no template.
    """
    checks = (
        (HARMONY.name, "<|channel|>" in tokens and ("<|channel|>" in template or model_type == "gpt_oss")),
        (MISTRAL.name, CALLS in tokens and ARGS in tokens),
        (MISTRAL_LIST.name, CALLS in tokens),
        (DEEPSEEK_V3.name, "<｜tool▁sep｜>" in tokens and "```json" in template),
        (DEEPSEEK_V31.name, "<｜tool▁sep｜>" in tokens),
        (GLM.name, "<arg_key>" in template),
        (QWEN3_CODER.name, "<function=" in template and "<parameter=" in template),
        (HERMES.name, "<tool_call>" in template),
        (LLAMA3.name, "<|python_tag|>" in tokens and "parameters" in template),
    )
    return next((name for name, matches in checks if matches), NONE) if template else NONE


def _detect_reasoning_format(template: str, tokens: Collection[str]) -> str:
    if "[THINK]" in tokens:
        return "mistral"
    return "think" if "<think>" in tokens or "<think>" in template or "</think>" in template else NONE
