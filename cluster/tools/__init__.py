"""Commands that look at checkpoints and say what they are."""
