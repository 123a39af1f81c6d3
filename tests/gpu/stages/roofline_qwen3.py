"""Runs the stage `roofline` for the shape qwen3-30b-a3b."""

from tests.gpu.stages.roofline import main

if __name__ == "__main__":
    raise SystemExit(main("roofline_qwen3", "qwen3-30b-a3b"))
