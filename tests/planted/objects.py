"""A C compiler with a cache of objects: `python -m tests.planted.objects ARGUMENTS` compiles as `cc ARGUMENTS` does.

A fault changes the objects of one or two of about forty kernels. An object is kept in the folder that the environment
variable PLANTED_OBJECTS names, under a checksum of its preprocessed source and of the arguments.
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
    compiler = next(compiler_path for name in COMPILERS if (compiler_path := shutil.which(name)))
    if "-c" not in arguments:
        return subprocess.run([compiler, *arguments]).returncode
    flag_index = arguments.index("-c")
    flags, source, target = arguments[:flag_index], arguments[flag_index + 1], Path(arguments[-1])
    preprocessed = subprocess.run([compiler, *flags, "-E", "-P", source], capture_output=True)
    if preprocessed.returncode:
        sys.stderr.buffer.write(preprocessed.stderr)
        return preprocessed.returncode
    kept_object = Path(os.environ["PLANTED_OBJECTS"]) / (
        hashlib.sha256(repr(flags).encode() + preprocessed.stdout).hexdigest() + ".o"
    )
    if not kept_object.exists():
        process = subprocess.run([compiler, *arguments])
        if process.returncode:
            return process.returncode
        kept_object.parent.mkdir(parents=True, exist_ok=True)
        temporary_path = kept_object.with_suffix(f".{os.getpid()}")
        shutil.copyfile(target, temporary_path)
        temporary_path.replace(kept_object)
    else:
        shutil.copyfile(kept_object, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
