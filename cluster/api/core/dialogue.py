"""The messages of a chat request, put together from the items or blocks of another API, which has more parts."""

from typing import Any

from cluster.api.core.errors import path_of


class Dialogue:
    """Messages in the order in which their parts are added. `origins` says which field each of them came from.

    What an assistant thought, said and called in one turn is one message, as chat templates write it.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.origins: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None

    def say(self, role: str, text: str, origin: str, at: str = "content") -> None:
        """A message with text, or the text of the assistant's turn; it stands in the field `at` of its origin."""
        if role == "assistant":
            turn = self._assistant(origin, not_after=("content", "tool_calls"))
            turn["content"] = text
        else:
            self._add({"role": role, "content": text}, origin)
        self.origins[f"{self._last}.content"] = path_of(origin, at) if at else origin

    def think(self, text: str, origin: str) -> None:
        """What the assistant thought before what it says or calls next."""
        turn = self._assistant(origin, not_after=("reasoning_content", "content", "tool_calls"))
        turn["reasoning_content"] = text
        self.origins[f"{self._last}.reasoning_content"] = origin

    def call(self, call_id: str, name: str, arguments: str, origin: str, id_at: str) -> None:
        """A tool that the assistant called; its id stands in the field `id_at` of its origin."""
        turn = self._assistant(origin, not_after=())
        calls = turn.setdefault("tool_calls", [])
        path = f"{self._last}.tool_calls.{len(calls)}"
        self.origins |= {path: origin, f"{path}.function": origin, f"{path}.id": path_of(origin, id_at)}
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str, origin: str, id_at: str, at: str) -> None:
        """What a tool gave back; text and id stand in the fields `at` and `id_at` of its origin."""
        self._add({"role": "tool", "tool_call_id": call_id, "content": text}, origin)
        self.origins[f"{self._last}.tool_call_id"] = path_of(origin, id_at)
        self.origins[f"{self._last}.content"] = path_of(origin, at)

    def end_turn(self) -> None:
        """What the assistant says next is another message."""
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
        """The assistant's turn; another one where a part of `not_after` is already in it."""
        turn = self._turn
        if turn is None or any(turn.get(part) for part in not_after):
            turn = self._add({"role": "assistant", "content": ""}, origin)
            self._turn = turn
        return turn
