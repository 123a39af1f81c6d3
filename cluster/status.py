"""What a rank says of its load and progress: the engine counts, heartbeats carry it, `/server_info` shows it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Load and progress of one rank. `own_seconds` of its steps it did not wait in collectives."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    pages_free: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    accept_length: float = 0.0
    padded_rows: int = 0
    own_seconds: float = 0.0
