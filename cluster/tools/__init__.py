"""Commands that work on checkpoints and prompts without a server: generate, inspect, export, probe, sample."""
