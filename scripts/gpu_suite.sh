#!/usr/bin/env bash
# Checks and measures spsjax on one accelerator, and compares it with Hugging Face `generate` there.
#
#   bash scripts/gpu_suite.sh runs/gpu           # what nine minutes on one H100 or H200 allow
#   bash scripts/gpu_suite.sh runs/gpu --tiny    # a part of everything at tiny shapes: a minute on a CPU
#   PARTS="loop huggingface" bash scripts/gpu_suite.sh runs/gpu
#
# The folder receives a JSON and a log per part, results.json, results.png, and the compiled programs
# (cache/): with them, a second run compiles only what has changed. The report is of all results in
# the folder; a part that runs again replaces its own. The parts:
#
#   loop         ArS, SpS and trees against the memory's bandwidth, with random weights
#   huggingface  `generate` at the same shapes: plain, assisted, static cache with torch.compile
#   flips        greedy texts of the shipped pair, bfloat16 against float32, SpS against ArS
#   tests        the drafters' contract tests on the accelerator; last, because they would disturb
#
# It needs spsjax's packages; for `huggingface` torch and transformers, for `tests` pytest, for the
# plot matplotlib. PYTHON=python3.12 takes another interpreter. SUITE_SECONDS (500) ends all parts.
# The exit code is 1 if a part failed; one that time ended has not.
set -uo pipefail
fail() { echo "error: $1" >&2; exit 1; }
[ $# -ge 1 ] && [ $# -le 2 ] && [[ $1 != -* ]] ||
  fail "expected a folder: bash scripts/gpu_suite.sh runs/gpu [--tiny]"
case "${2:-}" in
  "") SIZE=full ;;
  --tiny) SIZE=tiny ;;
  *) fail "$2: expected --tiny or nothing" ;;
esac
PARTS=${PARTS:-loop huggingface flips tests}
[[ $PARTS == *[![:space:]]* ]] ||
  fail "PARTS: expected some of loop, huggingface, flips, tests, found none"
for part in $PARTS; do
  [[ " loop huggingface flips tests " == *" $part "* ]] ||
    fail "PARTS: expected some of loop, huggingface, flips, tests, found $part"
done
[[ ${SUITE_SECONDS:=500} =~ ^[1-9][0-9]{0,5}$ ]] ||
  fail "SUITE_SECONDS: expected 1 to 999999 seconds, found $SUITE_SECONDS"
PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || fail "PYTHON: expected an interpreter, found $PYTHON"
END=$((SECONDS + SUITE_SECONDS))
mkdir -p "$1" 2>/dev/null && [ -w "$1" ] || fail "$1: expected a folder that can be written"
OUT=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export XLA_PYTHON_CLIENT_PREALLOCATE=false  # several processes share the accelerator
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$OUT/cache}
rm -f "$OUT/lock" "$OUT/status"
SUITE=("$PYTHON" scripts/gpu_suite.py "--config=configs/experiments/gpu_suite.py:$SIZE"
  "--out=$OUT" "--lock=$OUT/lock")

has() { [[ " $PARTS " == *" $1 "* ]]; }
run_part() {  # name command...: with its own log, ended when time is up
  local name=$1 begun=$SECONDS code=0
  shift
  rm -f "$OUT/part-$name.json"
  timeout --foreground --kill-after=10 $((END > SECONDS ? END - SECONDS : 1)) "$@" \
    >"$OUT/$name.log" 2>&1 || code=$?
  [ $code = 0 ] || [ $code = 124 ] || echo "$name" >>"$OUT/status"
  echo "$name: exit code $code after $((SECONDS - begun)) s, $OUT/$name.log"
}

pairs=$("${SUITE[@]}" --part=pairs) || exit 1
[ -n "$pairs" ] || fail "PYTHON: expected an interpreter that runs scripts, found $PYTHON"
if has huggingface && ! "$PYTHON" -c "import torch, transformers" 2>/dev/null; then
  echo "huggingface: left out, torch or transformers is not installed"
  PARTS=${PARTS/huggingface/}
fi
# All pairs of a part prepare beside each other. The two parts do not: to compile for PyTorch takes
# so long that the loop's turn would come too late.
for part in loop huggingface; do
  profile=""
  [ $part = loop ] && profile=--profile
  for pair in $pairs; do
    has $part && run_part "$part-$pair" "${SUITE[@]}" "--part=$part" "--pair=$pair" $profile &
  done
  wait
done
# What follows takes no times: kernels that are tried against others would only take time to compile.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_autotune_level=0"
has flips && run_part flips "${SUITE[@]}" --part=flips
if has tests; then
  platform=$("$PYTHON" -c 'import jax; print({"gpu": "cuda"}.get(jax.default_backend(), "cpu"))')
  tests="tests/decode/chunks_and_rows_test.py tests/decode/contract_test.py"
  only="not eight and not mesh" beside=""
  [ $SIZE = tiny ] && tests=tests/decode/contract_test.py only=hashable
  [ $SIZE = full ] && "$PYTHON" -c "import xdist" 2>/dev/null && beside=--numprocesses=8
  # Each result is printed at once, because time may run out.
  SPSJAX_TEST_PLATFORM=$platform JAX_DEFAULT_MATMUL_PRECISION=highest run_part tests \
    "$PYTHON" -m pytest -v --tb=short -p no:cacheprovider $beside -k "$only" $tests
fi
for part in ${PARTS/tests/}; do
  compgen -G "$OUT/part-$part*.json" >/dev/null ||
    echo "$part: no results; more SUITE_SECONDS than $SUITE_SECONDS may help, and its log says more"
done
if compgen -G "$OUT/part-*.json" >/dev/null; then
  "${SUITE[@]}" --part=report 2>&1 | tee "$OUT/report.txt" || echo report >>"$OUT/status"
fi
[ ! -e "$OUT/status" ] || fail "these parts failed: $(tr '\n' ' ' <"$OUT/status")"
