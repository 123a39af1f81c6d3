"""The stages of `tests/gpu/all.sh`. Each is a module that is run with the folder for results, and `--dry` on a CPU."""
