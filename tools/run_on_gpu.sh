#!/usr/bin/env bash
# Runs the GPU tests, the benchmarks and the demo from what tools/pack_for_gpu.sh collected.
# Everything worth keeping lands in OUTPUT_FOLDER.
#
# usage: tools/run_on_gpu.sh OUTPUT_FOLDER [PART...]    parts: test figures speed exactness demo
set -uo pipefail
if [ $# -eq 0 ]; then
  echo "usage: $0 OUTPUT_FOLDER [PART...]    parts: test figures speed exactness demo" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
output=$1
shift
parts=${*:-test figures speed exactness demo}
mkdir -p "$output"
export PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD/carry/site:/tmp/gnsilu-wheels"
python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
  --target /tmp/gnsilu-wheels carry/wheels/*.whl
status=0
for part in $parts; do
  case $part in
    test)
      # What was running is in the log, should the machine's time be up.
      export PYTEST_ADDOPTS=-v
      python3 -c 'import pytest_timeout' 2>/dev/null && export PYTEST_ADDOPTS='-v --timeout 100'
      make gpu-test INSTALLED=1 PYTHON=python3 GTEST_DIR=carry/tests >"$output/test.log" 2>&1 ||
        status=1
      unset PYTEST_ADDOPTS
      cp tests/gpu_record.json "$output/"
      grep -E '^(FAILED|ERROR|E  )|passed|SUMMARY|calls checked' "$output/test.log" | tail -60
      ;;
    figures)
      python3 benchmarks/first_figures.py --output "$output/first_figures.json" 2>&1 |
        tee "$output/first_figures.log" || status=1
      ;;
    speed)
      # After each shape it writes its figures, should the machine's time be up.
      python3 benchmarks/speed.py --output "$output" 2>&1 | tee "$output/speed.log" || status=1
      ;;
    exactness)
      python3 benchmarks/exactness.py --output "$output" 2>&1 | tee "$output/exactness.log" ||
        status=1
      ;;
    demo)
      python3 benchmarks/demo.py --output "$output/demo" >"$output/demo.log" 2>&1 || status=1
      tail -80 "$output/demo.log"
      ;;
  esac
done
exit $status
