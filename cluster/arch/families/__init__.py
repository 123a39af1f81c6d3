"""One file per target family: converts its config.json to a `TargetArch`, and maps its tensor names."""
