"""The output folder of `aerie train`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.train.command import add_arguments, plan_of


def parse_arguments(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_quick_training_does_not_write_into_the_demo_folder() -> None:
    assert plan_of(parse_arguments()).out == Path("models/demo")
    assert plan_of(parse_arguments("--quick")).out != Path("models/demo")
