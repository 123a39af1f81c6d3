"""Deploy examples/two_nodes/serve.yaml by `serve deploy` on a Ray cluster of two nodes, and print a JSON result.

Both nodes are on this machine. tests/test_examples.py runs `python -m tests.serving.actors.two_nodes`.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import yaml

from tests.serving.actors.apart import CHECKOUT, print_result, start_ray_cluster
from tests.serving.actors.declared_gpus import SOON_S, unused_port, wait_for_applications

CONFIG_FILE = CHECKOUT / "examples" / "two_nodes" / "serve.yaml"


def main() -> None:
    port, dashboard = unused_port(), unused_port()
    head = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": dashboard, "num_cpus": 2}
    with start_ray_cluster(head, {"other": {"num_cpus": 2}}) as running_cluster:
        config = yaml.safe_load(CONFIG_FILE.read_text(encoding="utf-8"))
        config["http_options"]["port"] = port
        config["applications"][0]["args"]["log_file"] = str(running_cluster.folder / "log")
        config_file = running_cluster.folder / "serve.yaml"
        config_file.write_text(yaml.safe_dump(config), encoding="utf-8")
        serve = str(Path(sys.executable).with_name("serve"))
        command = [serve, "deploy", str(config_file), "--address", f"http://127.0.0.1:{dashboard}"]
        subprocess.run(command, check=True, timeout=SOON_S, capture_output=True)
        url, app = f"http://127.0.0.1:{port}", wait_for_applications(["aerie"])["aerie"]
        result: dict[str, object] = {"status": app["state"], "said": app["said"]}
        if app["state"] == "RUNNING":
            body = {"prompt": "import os\n", "max_tokens": 8, "temperature": 0}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=SOON_S).json()
            result["text"] = response["choices"][0]["text"]
            info = httpx.get(f"{url}/server_info", timeout=SOON_S).json()
            result["nodes"] = [rank["node"] for rank in info["ranks"]]
        print_result(result)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(CHECKOUT)
    main()
