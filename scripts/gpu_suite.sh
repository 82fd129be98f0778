#!/usr/bin/env bash
# Checks and measures spsjax on one accelerator, and compares it with Hugging Face `generate` there.
#
#   bash scripts/gpu_suite.sh runs/gpu             # under nine minutes on one H100 or H200
#   bash scripts/gpu_suite.sh runs/gpu --tiny      # all of it at tiny shapes, on a CPU, in a minute
#   PARTS="loop huggingface" bash scripts/gpu_suite.sh runs/gpu
#
# The folder receives a JSON and a log per part, results.json, results.png, and the compiled programs
# (cache/): with them, a second run compiles only what has changed. The parts:
#
#   loop         ArS, SpS and trees against the memory's bandwidth, with random weights
#   huggingface  `generate` at the same shapes: plain, assisted, static cache with torch.compile
#   flips        greedy texts of the shipped pair, bfloat16 against float32, SpS against ArS
#   tests        the drafters' contract tests on the accelerator; last, because they would disturb
#
# It needs the packages of spsjax, for `huggingface` torch and transformers, and for `tests` pytest
# and pytest-xdist. PYTHON=python3.12 takes another interpreter. SUITE_SECONDS (500) ends all parts.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${1:?"expected a folder: bash scripts/gpu_suite.sh runs/gpu"}
case "${2:-}" in
  "") SIZE=full ;;
  --tiny) SIZE=tiny ;;
  *) echo "error: ${2}: expected --tiny or nothing" >&2; exit 1 ;;
esac
PARTS=${PARTS:-loop huggingface flips tests}
for part in $PARTS; do
  case "$part" in
    loop | huggingface | flips | tests) ;;
    *) echo "error: PARTS: expected some of loop, huggingface, flips, tests, found $part" >&2; exit 1 ;;
  esac
done
END=$((SECONDS + ${SUITE_SECONDS:-500}))
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # several processes share the accelerator
mkdir -p "$OUT" || exit 1
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$(cd "$OUT" && pwd)/cache}
rm -f "$OUT"/part-*.json "$OUT"/*.log "$OUT/lock"

run_part() {  # name command...: a part with its own log, ended when time is up
  local name=$1 begun=$SECONDS code=0
  shift
  timeout --kill-after=10 $((END > SECONDS ? END - SECONDS : 1)) "$@" >"$OUT/$name.log" 2>&1 || code=$?
  echo "$name: exit code $code after $((SECONDS - begun)) s, $OUT/$name.log"
}
suite() {
  "$PYTHON" scripts/gpu_suite.py --config="configs/experiments/gpu_suite.py:$SIZE" --out="$OUT" \
    --lock="$OUT/lock" "$@"
}
export -f suite
export PYTHON SIZE OUT

pairs=$(suite --part=pairs) || exit 1
for pair in $pairs; do
  for part in loop huggingface; do
    [[ " $PARTS " == *" $part "* ]] || continue
    profile=
    [ "$part" = loop ] && profile=--profile
    run_part "$part-$pair" bash -c "suite --part=$part --pair=$pair $profile" &
  done
done
wait
[[ " $PARTS " == *" flips "* ]] && run_part flips bash -c "suite --part=flips"
if [[ " $PARTS " == *" tests "* ]]; then
  platform=$("$PYTHON" -c 'import jax; print({"gpu": "cuda"}.get(jax.default_backend(), "cpu"))')
  tests="tests/core_test.py tests/drafter_contract_test.py"
  only="not eight and not mesh"
  [ $SIZE = tiny ] && tests=tests/drafter_contract_test.py only=hashable
  # Each result is printed at once, because time may run out.
  SPSJAX_TEST_PLATFORM=$platform JAX_DEFAULT_MATMUL_PRECISION=highest run_part tests \
    "$PYTHON" -m pytest -v --tb=short -p no:cacheprovider -k "$only" $tests
fi
suite --part=report 2>&1 | tee "$OUT/report.txt"
