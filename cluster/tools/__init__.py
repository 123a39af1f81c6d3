"""Commands that work on checkpoints and prompts, and two that talk to a server: chat and status."""
