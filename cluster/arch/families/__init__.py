"""One file per target family: converts its config.json to a `TargetArch`, and maps its tensor names.

A new family also needs a line in `FAMILIES` of `arch/read.py`.
"""
