"""The client side of a chat: its messages, its request settings, and the slash commands that change them."""

import json
from typing import Any

from cluster.api.core.conversation import ChatRequest
from cluster.api.core.errors import ApiError

RESERVED_FIELDS = (
    *("messages", "model", "stream", "stream_options", "n", "return_token_ids", "return_tree"),
    *("logprobs", "top_logprobs"),
)
HELP = """\
/set NAME VALUE   a field of the requests, such as temperature, top_p, seed, max_tokens or stop; without VALUE: the
                  server's default again; without NAME: what is set
/system TEXT      set the system message; without TEXT: remove it
/reset            forget all messages but the system message
/exit             as Ctrl-D
Ctrl-C stops an answer. To send a line that begins with a slash, put a space before it."""


class Conversation:
    """The messages so far, the system message (`system`), and the request fields to send each time (`settings`)."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        self.settings: dict[str, Any] = {}
        self._messages: list[dict[str, str]] = []

    def body(self, question: str) -> dict[str, Any]:
        """Return the body of the request that asks `question`."""
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.settings, "messages": [*system_messages, *self._messages, {"role": "user", "content": question}]}

    def add_answer(self, question: str, answer: str) -> None:
        """Append a question and its answer to the messages."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Run a slash command; return the text to show to the user.

        Raises:
            ValueError: the command or the field is unknown, or the field cannot have this value.
        """
        word, _, argument = line.partition(" ")
        if word == "/set":
            name, _, value = argument.strip().partition(" ")
            self.set(name, value.strip())
            return " ".join(f"{key}={json.dumps(value)}" for key, value in self.settings.items()) or "nothing is set"
        if word == "/system":
            self.system = argument.strip()
            return "the system message is set" if self.system else "there is no system message"
        if word == "/reset":
            self._messages = []
            return "forgotten"
        if word == "/help":
            return HELP
        raise ValueError(f"there is no command {word!r}; /help lists them")

    def set(self, name: str, value: str) -> None:
        """Set a request field. `value` is parsed as JSON; if it is not JSON, it is used as text. An empty value removes
        the field.

        Raises:
            ValueError: the field is unknown, belongs to the chat itself, or cannot have this value.
        """
        if not value:
            self.settings.pop(name, None)
            return
        try:
            parsed_value = json.loads(value)
        except json.JSONDecodeError:
            parsed_value = value
        settings = {**self.settings, name: parsed_value}
        try:
            _, unknown = ChatRequest.read({**settings, "messages": [{"role": "user", "content": ""}]})
        except ApiError as error:
            raise ValueError(error.message) from None
        if name in RESERVED_FIELDS or unknown:
            raise ValueError(unknown[0].replace(" ignored", "") if unknown else f"{name} cannot be set in a chat")
        self.settings = settings
