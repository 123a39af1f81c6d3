"""Chat with an Aerie server, or with any other server that has OpenAI's API. Only Python's standard library is needed.

    python examples/chat_client.py --url http://127.0.0.1:8000

Each line of the input is a message; the answer is printed as it comes. The conversation goes on until the input ends.
"""

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def stream(url: str, key: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed chat. If the server refuses the request, urllib.error.HTTPError is raised; its
    body says why.
    """
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:  # server-sent events: `data: {...}` and empty lines
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:  # the stream had begun when it failed
                    raise RuntimeError(chunk["error"]["message"])
                yield chunk


def main() -> int:
    """Chat until the input ends. Return 1 if the server refuses a request, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()

    messages = [{"role": "system", "content": args.system}] if args.system else []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.rstrip("\n")})
        body = {"messages": messages, "temperature": args.temperature, "max_tokens": args.max_tokens}
        answer = ""
        try:
            for chunk in stream(args.url.rstrip("/"), args.api_key, body):
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    print(piece, end="", flush=True)
        except urllib.error.HTTPError as error:
            print(json.load(error)["error"]["message"], file=sys.stderr)
            return 1
        print()
        messages.append({"role": "assistant", "content": answer})
    return 0


if __name__ == "__main__":
    sys.exit(main())
