"""examples/two_nodes/serve.yaml, deployed by `serve deploy` on a Ray cluster of two nodes on this machine; prints what
came of it as JSON.

`python -m tests.actors.two_nodes` is what tests/test_examples.py runs.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import yaml

from tests.actors.apart import CHECKOUT, nodes, say
from tests.actors.declared_gpus import SOON_S, settled, unused_port

FILE = CHECKOUT / "examples" / "two_nodes" / "serve.yaml"


def main() -> None:
    port, dashboard = unused_port(), unused_port()
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": dashboard, "num_cpus": 2}
    with nodes(head, {"other": {"num_cpus": 2}}) as started:
        config = yaml.safe_load(FILE.read_text(encoding="utf-8"))
        config["http_options"]["port"] = port
        config["applications"][0]["args"]["log_file"] = str(started.folder / "log")
        written = started.folder / "serve.yaml"
        written.write_text(yaml.safe_dump(config), encoding="utf-8")
        serve = str(Path(sys.executable).with_name("serve"))
        command = [serve, "deploy", str(written), "--address", f"http://127.0.0.1:{dashboard}"]
        subprocess.run(command, check=True, timeout=SOON_S, capture_output=True)
        url, app = f"http://127.0.0.1:{port}", settled(["aerie"])["aerie"]
        found: dict[str, object] = {"status": app["state"], "said": app["said"]}
        if app["state"] == "RUNNING":
            body = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SOON_S).json()
            found["text"] = answer["choices"][0]["text"]
            info = httpx.get(f"{url}/server_info", timeout=SOON_S).json()
            found["nodes"] = [rank["node"] for rank in info["ranks"]]
        say(found)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
