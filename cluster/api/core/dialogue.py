"""Builds the messages of a chat request from the items or blocks of another API."""

from typing import Any

from cluster.api.core.errors import path_of


class Dialogue:
    """Chat messages, built from parts in order. An assistant's turn (reasoning, text, tool calls) becomes one message.

    `origins` maps the path of each message and part to the path of its source in the other API's body. The methods take
    the path of the source as `origin`.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None

    def say(self, role: str, text: str, origin: str, at: str = "content") -> None:
        """Add a message, or the text of the assistant's turn. The text came from the field `at` of `origin`, or from
        `origin` itself if `at` is empty.
        """
        if role == "assistant":
            turn = self._assistant(origin, not_after=("content", "tool_calls"))
            turn["content"] = text
        else:
            self._add({"role": role, "content": text}, origin)
        self.origins[f"{self._last}.content"] = path_of(origin, at) if at else origin

    def think(self, text: str, origin: str) -> None:
        """Add the reasoning that precedes the assistant's next text or tool call."""
        turn = self._assistant(origin, not_after=("reasoning_content", "content", "tool_calls"))
        turn["reasoning_content"] = text
        self.origins[f"{self._last}.reasoning_content"] = origin

    def call(self, call_id: str, name: str, arguments: str, origin: str, id_at: str) -> None:
        """Add a tool call of the assistant; its id came from the field `id_at` of `origin`."""
        turn = self._assistant(origin, not_after=())
        calls = turn.setdefault("tool_calls", [])
        path = f"{self._last}.tool_calls.{len(calls)}"
        self.origins |= {path: origin, f"{path}.function": origin, f"{path}.id": path_of(origin, id_at)}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str, origin: str, id_at: str, at: str) -> None:
        """Add the result of a tool; text and id came from the fields `at` and `id_at` of `origin`."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, origin)
        self.origins[f"{self._last}.tool_call_id"] = path_of(origin, id_at)
        self.origins[f"{self._last}.content"] = path_of(origin, at)

    def end_turn(self) -> None:
        """End the assistant's turn: its next part begins a new message."""
        self._turn = None

    @property
    def _last(self) -> str:
        return f"messages.{len(self.messages) - 1}"

    def _add(self, message: dict[str, Any], origin: str) -> dict[str, Any]:
        self._turn = None
        self.messages.append(message)
        self.origins[self._last] = origin
        return message

    def _assistant(self, origin: str, not_after: tuple[str, ...]) -> dict[str, Any]:
        """Return the assistant's open message. If no message is open, or the open one already has a part in
        `not_after`, add a new message and return that.
        """
        turn = self._turn
        if turn is None or any(turn.get(part) for part in not_after):
            turn = self._add({"role": "assistant", "content": ""}, origin)
            self._turn = turn
        return turn
