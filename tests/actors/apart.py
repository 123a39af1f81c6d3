"""What a module of the tests shows that starts a Ray cluster, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def found_by(module: str, seconds: float) -> Any:
    """What `python -m module` prints behind `FOUND `, as JSON."""
    checkout = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=seconds)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[-1].removeprefix("FOUND "))
