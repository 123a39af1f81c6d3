import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.actors.local_ray import LocalRay
from cluster.api.proxy.middleware import CALLBACK, IMPORT_PATH

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="package")
def local_ray() -> Iterator[LocalRay]:
    """Start one small Ray for all tests of this folder. Its workers can import `counting_engine` of this folder."""
    python_path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{CHECKOUT}{os.pathsep}{python_path}" if python_path else str(CHECKOUT)
    os.environ.setdefault(CALLBACK, IMPORT_PATH)  # as `aerie serve` does
    cluster = LocalRay(num_cpus=6, object_store_mib=80)
    cluster.start()
    yield cluster
    cluster.stop()
    os.environ["PYTHONPATH"] = python_path
