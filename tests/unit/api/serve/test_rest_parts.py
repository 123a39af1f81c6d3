"""A replica loads its tokenizer and chat template, and a start that cannot succeed ends at once."""

import asyncio
import json
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from cluster.api.core.conversation import ChatRequest
from cluster.api.serve.rest_parts import RestParts, gather_or_cancel, load_rest
from cluster.config import ConfigError, EngineConfig
from cluster.paths.checkout import CHECKOUT, DEMO_TARGET


def test_gather_or_cancel_raises_the_first_failure_without_waiting() -> None:
    async def endless() -> None:
        await asyncio.Event().wait()

    async def fails() -> None:
        raise ConfigError("no tokenizer")

    async def returns_three() -> int:
        return 3

    async def gather_and_count_tasks(*pair: Coroutine[Any, Any, None]) -> int:
        """The number of other tasks after `gather_or_cancel` has failed."""
        with pytest.raises(ConfigError, match="no tokenizer"):
            await asyncio.wait_for(gather_or_cancel(*pair), 10)
        await asyncio.sleep(0)  # a cancelled task ends in the next turn of the event loop
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(gather_or_cancel(returns_three(), returns_three())) == (3, 3)
    assert asyncio.run(gather_and_count_tasks(endless(), fails())) == 0
    assert asyncio.run(gather_and_count_tasks(fails(), endless())) == 0


def rest_of(folder: Path, **more: str) -> RestParts:
    return load_rest(EngineConfig.model_validate({"model_path": str(folder), **more}), (None, None))


def test_unsupported_tokenizer_is_refused_and_missing_tokenizer_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert rest_of(tmp_path).tokenizer is None and "only token ids are served" in caplog.text
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"set tokenizer_path to a folder .* of a tekken.json with .*save_format"):
        rest_of(tmp_path)
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(ConfigError, match="no tokenizer at"):
        rest_of(tmp_path)


def test_chat_template_json_of_a_processor_is_used(tmp_path: Path) -> None:
    shutil.copy(CHECKOUT / DEMO_TARGET / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert not rest_of(tmp_path).tokenizer.has_template
    template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = rest_of(tmp_path).tokenizer
    chat_request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert asyncio.run(tokenizer.encode_chat(chat_request.messages, chat_request, 2)).text == "<hi>"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"chat_template\.json is not a JSON object"):
        rest_of(tmp_path)
