"""Command-line tools: commands on checkpoints and prompts, and two clients of a server, `chat` and `status`."""
