"""The command `aerie serve` (flags, checked settings, start and stop of the server), and the command `aerie keys`."""
