"""`aerie status` over a server whose ranks are killed, and that is gone."""

import json
import subprocess
import sys

import httpx
import pytest

from cluster.actors.local_ray import LocalRay
from tests.api.apps import arguments, kill, serving, shards
from tests.api.pty_command import CTRL_C, PtyCommand

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def once(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "status", "--once", "--url", url, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_status_command_shows_serving_rank_loss_and_unreachable_server(local_ray: LocalRay) -> None:
    with serving(arguments(ranks=2)) as url:
        state = json.loads(once(url, "--json").stdout)
        [gang] = state["gangs"]
        assert sorted(shards()) == [f"{gang['gang']}#{rank}.0" for rank in range(2)]
        assert (state["model"], gang["healthy"], state["losses"]) == ("counting", True, 0)
        assert [rank["rank"] for rank in gang["ranks"]] == [0, 1]
        assert f"gang {gang['gang']}, incarnation 0, 0 tokens queued: serving\n" in once(url).stdout
        with PtyCommand("status", "--url", url) as status:
            status.until(r"life 0, 0 tokens queued: serving")
            body = {"model": "counting", "prompt": [1], "max_tokens": 4000, "stream": True}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
                status.until(r"streaming 1 ")
                kill("ShardActor")
                status.until(r"not serving")
                status.until(r"latest loss, [^\n]*not back yet")
                status.until(r"life 1, \d+ tokens queued: serving[^~]*served again after")
                assert stream.read().endswith(b"data: [DONE]\n\n")
            status.until(r"streaming 0 [^\n]*losses 1   restarts 1   resumed streams 1")
            status.press(CTRL_C)
            assert status.status() == 0
        gone = PtyCommand("status", "--url", url)
        gone.until("serving")
    with gone:
        gone.until(r"no answer from [^\n]*; trying again")
    done = once(url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"aerie status: no answer from {url}: Connection refused\n"
