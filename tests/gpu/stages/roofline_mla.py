"""Runs the stage `roofline` for the shape mla."""

from tests.gpu.stages.roofline import main

if __name__ == "__main__":
    raise SystemExit(main("roofline_mla", "mla"))
