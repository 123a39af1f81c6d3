"""One file per target family. It converts the family's config to a `TargetArch`, and maps the family's tensor names.

A new family also needs a line in `FAMILIES` of `arch/read.py`.
"""
