"""A C compiler that keeps its objects: `python -m tests.planted.objects ARGUMENTS` compiles as `cc ARGUMENTS` does.

A fault changes the objects of one kernel or two out of some forty. An object is kept in the folder PLANTED_OBJECTS
under a checksum of its preprocessed source and of the arguments.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")


def main(arguments: list[str]) -> int:
    """Compile, or copy the kept object; return the compiler's exit status."""
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    if "-c" not in arguments:
        return subprocess.run([compiler, *arguments]).returncode
    at = arguments.index("-c")
    flags, source, target = arguments[:at], arguments[at + 1], Path(arguments[-1])
    text = subprocess.run([compiler, *flags, "-E", "-P", source], capture_output=True)
    if text.returncode:
        sys.stderr.buffer.write(text.stderr)
        return text.returncode
    kept = Path(os.environ["PLANTED_OBJECTS"]) / (hashlib.sha256(repr(flags).encode() + text.stdout).hexdigest() + ".o")
    if not kept.exists():
        done = subprocess.run([compiler, *arguments])
        if done.returncode:
            return done.returncode
        kept.parent.mkdir(parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(target, half)
        half.replace(kept)
    else:
        shutil.copyfile(kept, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
