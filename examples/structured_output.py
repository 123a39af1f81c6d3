"""Ask a server for JSON that follows a schema, with Python's standard library alone.

    python examples/structured_output.py --url http://127.0.0.1:8000

The schema is enforced token by token: whatever the model would like to write, an answer that ends with finish_reason
"stop" is valid. An answer that is cut off by max_tokens ("length") is not complete.
"""

import argparse
import json
import os
import sys
import urllib.request
from typing import Any

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "arguments": {"type": "array", "items": {"enum": ["self", "size", "path"]}, "maxItems": 3},
        "returns": {"enum": ["None", "bool", "str"]},
    },
    "required": ["name", "arguments", "returns"],
    "additionalProperties": False,
}
SOURCES = ("def read(self, size=-1):", "def exists(path):", "def close(self):")


def ask(url: str, key: str, source: str) -> dict[str, Any]:
    """Ask the server to describe `source`, and return the first choice of its answer."""
    body = {
        "messages": [
            {"role": "system", "content": "Describe the Python function as JSON."},
            {"role": "user", "content": source},
        ],
        "response_format": {"type": "json_schema", "json_schema": {"name": "function", "schema": SCHEMA}},
        "temperature": 0,
        "max_tokens": 128,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
        return choice


def main() -> int:
    """Print a line for each source: the JSON, or the text that was cut off. Return 1 if a text was cut off, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    args = parser.parse_args()
    whole = True
    for source in SOURCES:
        choice = ask(args.url.rstrip("/"), args.api_key, source)
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            print(json.dumps(json.loads(text)))
        else:
            print(f"cut off ({choice['finish_reason']}): {text}")
            whole = False
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
