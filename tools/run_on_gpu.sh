#!/usr/bin/env bash
# Runs the GPU tests, the benchmarks and the demo from what tools/pack_for_gpu.sh collected.
# Everything worth keeping lands in OUTPUT_FOLDER.
#
# usage: tools/run_on_gpu.sh OUTPUT_FOLDER [PART...]    parts: test speed exactness roofline decode demo
#
# The tests run on by themselves, for machines that end a command after some minutes: this waits for
# them PATIENCE seconds (540), and the same part, called again, waits on. Ends with status 3 where
# they are not ready. PYTEST_ADDOPTS is passed on.
set -uo pipefail
if [ $# -eq 0 ]; then
  echo "usage: $0 OUTPUT_FOLDER [PART...]    parts: test speed exactness roofline decode demo" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
output=$1
shift
parts=${*:-test speed exactness roofline decode demo}
mkdir -p "$output"
export PYTHONUNBUFFERED=1
wheels=/tmp/gnsilu-wheels
export PYTHONPATH="$PWD/carry/site:$wheels"
if [ ! -d $wheels ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target $wheels \
    carry/wheels/*.whl
fi

# In a copy of this folder, which may be written to again while they run.
start_tests() {
  mkdir -p $tests/tree
  tar -c --exclude=./.git --exclude='./.venv*' --exclude=./build . | tar -x -C $tests/tree
  # What was running is in the log, whatever ends it. Threads that wait must not spin: on cores that
  # are shared with others that takes many times as long.
  local options='-v -o faulthandler_timeout=60'
  python3 -c 'import pytest_timeout' 2>/dev/null && options+=' --timeout=200'
  # Side by side, by the file: a test that limits the GPU's memory does it for its process.
  python3 -c 'import xdist' 2>/dev/null && options+=' -n 7 --dist loadfile'
  OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 PYTEST_ADDOPTS="$options ${PYTEST_ADDOPTS:-}" \
    PYTHONPATH="$tests/tree/carry/site:$wheels" \
    setsid bash -c 'cd "$0/tree"
      make gpu-test INSTALLED=1 PYTHON=python3 GTEST_DIR=carry/tests
      echo $? >"$0/status"' $tests </dev/null >$tests/log 2>&1 &
}

run_tests() {
  local tests=/tmp/gnsilu-tests
  [ -d $tests ] || start_tests
  local end=$((SECONDS + ${PATIENCE:-540}))
  until [ -s $tests/status ] || [ $SECONDS -ge $end ]; do sleep 1; done
  cp $tests/log "$output/test.log"
  if [ ! -s $tests/status ]; then
    tail -5 $tests/log
    echo "still running: call this part again" >&2
    exit 3
  fi
  local ended
  ended=$(cat $tests/status)
  cp $tests/tree/tests/gpu_record.json "$output/"
  grep -E '^(FAILED|ERROR|E  )|[0-9] passed|SUMMARY|calls checked' $tests/log | tail -60
  rm -rf $tests  # the next call begins anew
  return "$ended"
}

status=0
for part in $parts; do
  case $part in
    test)
      run_tests || status=1
      ;;
    speed)
      # After each shape it writes its figures, should the machine's time be up.
      python3 benchmarks/speed.py --output "$output" 2>&1 | tee "$output/speed.log" || status=1
      ;;
    exactness)
      python3 benchmarks/exactness.py --output "$output" 2>&1 | tee "$output/exactness.log" ||
        status=1
      ;;
    roofline)
      python3 benchmarks/roofline.py --output "$output" 2>&1 | tee "$output/roofline.log" || status=1
      ;;
    decode)
      python3 benchmarks/decode.py --output "$output" 2>&1 | tee "$output/decode.log" || status=1
      ;;
    demo)
      python3 benchmarks/demo.py --output "$output/demo" >"$output/demo.log" 2>&1 || status=1
      tail -80 "$output/demo.log"
      ;;
  esac
done
exit $status
