"""Runs the stage `roofline` for the shape llama-8b."""

from tests.gpu.stages.roofline import main

if __name__ == "__main__":
    raise SystemExit(main("roofline_llama", "llama-8b"))
