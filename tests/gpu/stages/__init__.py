"""The stages of `tests/gpu/all.sh`: each a module that is run with the folder of results, and `--dry` on a CPU."""
