#!/usr/bin/env bash
# Measures what the page of a machine shows, and writes the page; hours on two cores:
#   source .venv/bin/activate
#   export SPEC_BENCH=question.jsonl GEMMA=gemma-3-270m.gguf
#   bash docs/benchmarks/measure.sh epyc_zen4 [speed drafters ...]
# The first argument names the machine's page. Further ones are measurements; without them all are
# made. Nothing else should run. SPEC_BENCH is the file of questions of github.com/hemingkx/Spec-Bench,
# GEMMA a GGUF file of google/gemma-3-270m.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
MACHINE=${1:?expected the name of a page, such as epyc_zen4}
shift
E=configs/experiments RUNS=runs/benchmarks

speed() {
  python scripts/benchmark.py --workdir="$1" --config.num_speculative_tokens="(2,4,6,8)"
}

chat() { # folder, drafters, settings: SmolLM2 answers questions
  mkdir -p "$RUNS"
  cp "$SPEC_BENCH" "$RUNS/question.jsonl" # the page shows the command, and with it this path
  python scripts/compare.py --workdir="$1" --target=smollm2 --drafters="$2" \
    --config.run_tasks="('spec_bench',)" --config.tasks.spec_bench.path="$RUNS/question.jsonl" \
    --config.run_settings="$3" --config.stop_at_eos=True \
    --config.chains="(4,)" --config.auto=False --config.branching="()" --config.dynamic="()" \
    --config.prompts=2 --config.max_new_tokens=64
}

smollm2() {
  chat "$1" suffix=suffix,n-gram=ngram "('greedy','nucleus')"
}

foreign() {
  local draft=$RUNS/gemma-3-270m.gguf
  mkdir -p "$RUNS"
  cp "$GEMMA" "$draft"
  chat "$1" "TLI=tli:$draft,SLEM=slem:$draft" "('greedy','sampled')"
}

drafters() {
  python scripts/compare.py --workdir="$1" \
    --drafters=draft-model=pystdlib/draft,EAGLE-3=pystdlib/eagle3,suffix=suffix,n-gram=ngram \
    --config.run_settings="('greedy','nucleus')" --config.chains="(4,)" --config.auto=True \
    --config.branching="((4,2,1,1),)" --config.dynamic="((16,5,4),)"
}

verifiers() {
  python scripts/compare.py --workdir="$1" --config=$E/compare_verifiers.py \
    --config.num_nodes="(8,)" --config.run_settings="('nucleus','greedy')" --config.prompts=4
}

load() {
  python scripts/benchmark.py --workdir="$1" --config=$E/load.py --config.rates="()" \
    --config.num_speculative_tokens="('0','4','auto','confidence')" --config.clients="(1,4,8)" \
    --config.requests=24
}

table1() {
  python scripts/reproduce.py --experiment=table1 --workdir="$1" --config.table1.tasks="('stdlib',)"
}

figure1() {
  python scripts/reproduce.py --experiment=figure1 --workdir="$1" --config.figure1.tasks="('stdlib',)"
}

rollouts() {
  python scripts/grpo.py --workdir="$1"
}

training() {
  python scripts/benchmark.py --workdir="$1" --config=$E/training_cost.py
}

[ $# -gt 0 ] || set -- speed smollm2 foreign drafters verifiers load table1 figure1 rollouts training
for name in "$@"; do # what is missing is said before anything is measured
  case $name in smollm2 | foreign) : "${SPEC_BENCH:?expected the file of questions}" ;; esac
  case $name in foreign) : "${GEMMA:?expected a GGUF file of gemma-3-270m}" ;; esac
done
for name in "$@"; do
  echo "== $name"
  "$name" "$RUNS/$name"
  mkdir -p "docs/benchmarks/$MACHINE"
  for file in table.json report.json figure1.png; do
    [ ! -f "$RUNS/$name/$file" ] || cp "$RUNS/$name/$file" "docs/benchmarks/$MACHINE/$name.${file#*.}"
  done
done
python docs/benchmarks/pages.py
