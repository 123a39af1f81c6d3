"""One file per target family: from its config.json to a `TargetArch`, and what it calls its tensors."""
