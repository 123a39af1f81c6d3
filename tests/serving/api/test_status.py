"""`aerie status` while a server's ranks are killed and restarted, and after the server has ended."""

import json
import subprocess
import sys

import httpx
import pytest

from cluster.actors.local_ray import LocalRay
from tests.serving.api.apps import app_args, kill, serving, shard_actor_names
from tests.serving.api.pty_command import CTRL_C, PtyCommand

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def status_once(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "status", "--once", "--url", url, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_status_command_shows_serving_rank_loss_and_unreachable_server(local_ray: LocalRay) -> None:
    with serving(app_args(ranks=2)) as url:
        state = json.loads(status_once(url, "--json").stdout)
        [gang] = state["gangs"]
        assert sorted(shard_actor_names()) == [f"{gang['gang']}#{rank}.0" for rank in range(2)]
        assert (state["model"], gang["healthy"], state["losses"]) == ("counting", True, 0)
        assert [rank["rank"] for rank in gang["ranks"]] == [0, 1]
        assert f"gang {gang['gang']}, incarnation 0, 0 tokens queued: serving\n" in status_once(url).stdout
        with PtyCommand("status", "--url", url) as status:
            status.read_until(r"incarnation 0, 0 tokens queued: serving")
            body = {"model": "counting", "prompt": [1], "max_tokens": 4000, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                status.read_until(r"streaming 1 ")
                kill("ShardActor")
                status.read_until(r"not serving")
                status.read_until(r"incarnation 1, \d+ tokens queued: serving[^~]*served again after")
                assert stream.read().endswith(b"data: [DONE]\n\n")
            status.read_until(r"streaming 0 [^\n]*losses 1   restarts 1   resumed streams 1")
            status.press(CTRL_C)
            assert status.exit_status() == 0
        second_view = PtyCommand("status", "--url", url)
        second_view.read_until("serving")
    with second_view:
        second_view.read_until(r"no answer from [^\n]*; trying again")
    final_status = status_once(url)
    assert (final_status.returncode, final_status.stdout) == (1, "")
    assert final_status.stderr == f"aerie status: no answer from {url}: Connection refused\n"
