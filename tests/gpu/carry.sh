#!/bin/bash
# Collects the packages that tests/gpu/all.sh needs on a machine that has torch, triton and transformers but no network:
# bash tests/gpu/carry.sh DIR
#
# It downloads the packages of needs.txt as wheels for CPython 3.12 (or PYTHON_VERSION) on x86-64 Linux, and unpacks
# them into DIR. Copy DIR to the machine, which needs no pip, and run: PYTHONPATH=DIR bash tests/gpu/all.sh OUT
set -eu
folder=${1:?usage: carry.sh DIR}
version=${PYTHON_VERSION:-3.12}
needs=$(cd "$(dirname "$0")" && pwd)/needs.txt
python3 -m pip install --quiet --no-compile --only-binary=:all: --upgrade --target "$folder" \
    --python-version "$version" --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --no-deps --requirement <(grep -v '^#' "$needs" | grep -v pydantic_core) # pydantic requires one exact core
core=$(sed -n 's/^Requires-Dist: pydantic[-_]core==\([^ ;]*\).*/\1/p' "$folder"/pydantic-*.dist-info/METADATA)
python3 -m pip install --quiet --no-compile --only-binary=:all: --upgrade --target "$folder" \
    --python-version "$version" --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --no-deps "pydantic_core==$core"
rm -rf "$folder/bin"
du -sh "$folder"
