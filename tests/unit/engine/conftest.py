from tests.parity.poison import poison_unused_memory  # noqa: F401
