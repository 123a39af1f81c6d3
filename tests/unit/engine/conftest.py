from tests.parity.poison import poisoned  # noqa: F401
