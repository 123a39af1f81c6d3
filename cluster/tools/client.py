"""An HTTP client for a server's pages and streams. Every error message is one line."""

import argparse
import json
import os
from collections.abc import Generator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from cluster.config import ConfigError

API_KEY_VARIABLE = "OPENAI_API_KEY"  # the environment variable that OpenAI's own clients read
PAGE_TIMEOUT_S = 10.0
STREAM_TIMEOUT_S = 600.0  # a stream pauses while a lost gang restarts
MAX_SHOWN_ERROR_CHARS = 200  # how much of an error's body is shown if it is not a JSON error object


class NoAnswerError(ValueError):
    """The server cannot be reached, or it answered with an error."""


def add_server_arguments(parser: argparse.ArgumentParser, url: str | None) -> None:
    """Declare --url, with `url` as its default, and --api-key."""
    parser.add_argument("--url", default=url, help="the server, as http://127.0.0.1:8000")
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"for a server that asks for one (default: {API_KEY_VARIABLE})"
    )


class Client:
    """A client of one server. Each call opens a connection of its own."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        page_timeout_s: float = PAGE_TIMEOUT_S,
        stream_timeout_s: float = STREAM_TIMEOUT_S,
    ) -> None:
        """`url` may end in /v1, as for OpenAI's clients. A stream fails if no event comes for `stream_timeout_s`; this
        also holds before the first event. If `api_key` is None, the environment variable `OPENAI_API_KEY` gives the
        key. If neither gives one, no key is sent.

        Raises:
            ConfigError: `url` is not an http or https URL.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"--url must be as http://127.0.0.1:8000, got {url!r}")
        self.url, self._page_timeout_s, self._stream_timeout_s = url, page_timeout_s, stream_timeout_s
        self._connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host_and_port = (parts.hostname, port)
        self._base_path = parts.path.rstrip("/").removesuffix("/v1")
        key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def page(self, path: str) -> str:
        """Return the body of GET `path`.

        Raises:
            NoAnswerError: the server cannot be reached, or the status is not 200.
        """
        connection = self._connection_class(*self._host_and_port, timeout=self._page_timeout_s)
        try:
            return self._request(connection, "GET", path).read().decode()
        except (OSError, HTTPException, ValueError) as error:
            raise self._no_answer_error(error) from None
        finally:
            connection.close()

    def json(self, path: str) -> dict[str, Any]:
        """Send GET `path` and return the JSON object in the server's answer.

        Raises:
            NoAnswerError: for the reasons of `page`, or because the body is not a JSON object.
        """
        try:
            parsed = json.loads(self.page(path))
        except json.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            raise NoAnswerError(f"{self.url}{path} is not a JSON object; is this an Aerie server?")
        return parsed

    def events(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """POST `body` to `path` and yield the events of the streamed answer. Closing the generator aborts the request.

        Raises:
            NoAnswerError: the request fails, the stream ends early, or one of its events is an error.
        """
        connection = self._connection_class(*self._host_and_port, timeout=self._page_timeout_s)
        try:
            connection.connect()  # with the short timeout of pages; the stream itself may pause for longer
            connection.sock.settimeout(self._stream_timeout_s)
            for line in self._request(connection, "POST", path, json.dumps(body)):
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise NoAnswerError(_one_line(event["error"].get("message")))
                    yield event
            raise NoAnswerError("the stream ended before the answer did")
        except (OSError, HTTPException, ValueError) as error:
            raise self._no_answer_error(error) from None
        finally:
            connection.close()

    def _request(self, connection: HTTPConnection, method: str, path: str, body: str | None = None) -> HTTPResponse:
        connection.request(method, self._base_path + path, body, {"Content-Type": "application/json", **self._headers})
        response = connection.getresponse()
        if response.status == 200:
            return response
        response_text = response.read(1 << 16).decode(errors="replace")
        try:
            message = json.loads(response_text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {response.status}: {response_text[:MAX_SHOWN_ERROR_CHARS]}"
        retry_after = response.headers.get("Retry-After")
        raise NoAnswerError(_one_line(message) + (f" (try again in {retry_after} s)" if retry_after else ""))

    def _no_answer_error(self, error: Exception) -> NoAnswerError:
        if isinstance(error, NoAnswerError):
            return error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return NoAnswerError(f"no answer from {self.url}: {_one_line(reason or type(error).__name__)}")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
