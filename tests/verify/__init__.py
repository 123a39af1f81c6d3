"""A record of the tests that passed, so that a slow suite runs only what has changed since: `make verify`."""
