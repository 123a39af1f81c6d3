"""Transfers between host and device, staged inputs, device timing, and the hook by which a step waits."""
