"""The error that a client gets when a grammar cannot be compiled."""

import asyncio
from typing import Any

import pytest

from cluster.api.core.constraints import OutputConstraint
from cluster.api.core.errors import ApiError
from cluster.api.core.grammars import Grammars
from cluster.api.core.limits import ModelInfo
from cluster.grammar.asked import Grammar
from cluster.grammar.compiler import CompilerError


def test_busy_grammar_compiler_gives_a_retryable_overloaded_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class BusyCompiler:
        async def compile(self, grammar: Grammar) -> str:
            raise CompilerError("this machine is too busy to compile it; try again")

    async def create_compiler(self: Grammars, tokenizer: Any) -> Any:
        return BusyCompiler()

    monkeypatch.setattr(Grammars, "_create_compiler", create_compiler)
    tokenizer: Any = object()
    grammars = Grammars(tokenizer, ModelInfo("m", 64, 256, created=0))
    with pytest.raises(ApiError, match=r"^response_format: this machine is too busy") as captured_error:
        asyncio.run(grammars.compile(OutputConstraint("response_format", Grammar("json_object"))))
    error = captured_error.value
    assert (error.status, error.kind, error.code, error.param) == (
        503, "overloaded_error", "overloaded", "response_format",
    )  # fmt: skip
    assert error.headers["Retry-After"] == "1"
