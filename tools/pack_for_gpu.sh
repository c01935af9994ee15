#!/usr/bin/env bash
# Collects in carry/ what a GPU machine without compiler or network needs to run the GPU tests:
#
#   carry/site    the installed package
#   carry/tests   the built C++ test programs
#   carry/wheels  diffusers, for the demo; pytest-xdist and pytest-timeout, for the tests
#
# usage: tools/pack_for_gpu.sh PYTHON BUILD_FOLDER
# There, in a copy of this folder:  tools/run_on_gpu.sh OUTPUT_FOLDER
set -euo pipefail
if [ $# -ne 2 ]; then
  echo "usage: $0 PYTHON BUILD_FOLDER" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
python=$1
build=$2

mkdir -p carry/site carry/tests carry/wheels
package=$("$python" -c 'import gnsilu, pathlib; print(pathlib.Path(gnsilu.__file__).parent)')
rm -rf carry/site/* carry/tests/*
cp -r "$package" "$(dirname "$package")"/gnsilu-*.dist-info carry/site/
rm -rf carry/site/gnsilu/__pycache__
cp "$build"/tests/* carry/tests/
# They need no GPU: what fails here would spoil the record there.
for test in carry/tests/*_test; do
  "$test" --gtest_brief=1
done
for wheel in diffusers pytest-timeout pytest-xdist execnet; do
  if ! ls carry/wheels/"${wheel//-/_}"-*.whl >/dev/null 2>&1; then
    "$python" -m pip download --quiet --no-deps --dest carry/wheels $wheel
  fi
done
du -sh carry
