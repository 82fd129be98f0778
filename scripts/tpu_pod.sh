#!/usr/bin/env bash
# Runs a script of this repository on a TPU slice, on all of its hosts, and brings the results back.
#
#   bash scripts/tpu_pod.sh all                    # prints every command, runs none
#   RUN=1 bash scripts/tpu_pod.sh create           # runs one step
#   RUN=1 TPU=my-slice ZONE=us-east5-a TYPE=v5p-32 bash scripts/tpu_pod.sh all
#
# Steps: create copy install run collect delete; all is all of them, and deletes the slice even if
# one fails. A slice costs money until it is deleted. What is copied is the last commit.
#
# TPU      name of the slice                       TYPE     accelerator type, as v5p-32 (16 chips)
# ZONE     where it is                             VERSION  software version; by default TYPE's
# COMMAND  what runs on every host                 RESULTS  folder that comes back from host 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TPU=${TPU:-spsjax} ZONE=${ZONE:-us-east5-a} TYPE=${TYPE:-v5p-32} RESULTS=${RESULTS:-runs}
COMMAND=${COMMAND:-"python scripts/benchmark.py --distributed \
--config.mesh.data=2 --config.mesh.model=8 --workdir=$RESULTS/pod"}

version() {
  case $TYPE in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) echo "TYPE: expected v4-, v5p-, v5litepod- or v6e- and a size, found '$TYPE'" >&2; return 1 ;;
  esac
}

do_it() {
  local word line=
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=-]+$ ]] || word=${word@Q}
    line+="$word "
  done
  printf '%s\n' "${line% }"
  [ "${RUN:-}" != 1 ] || "$@"
}

tpu() { do_it gcloud compute tpus tpu-vm "$@" --zone="$ZONE"; }
everywhere() { tpu ssh "$TPU" --worker=all --command="cd spsjax && $1"; }

create() {
  local version
  version=${VERSION:-$(version)} || return
  tpu create "$TPU" --accelerator-type="$TYPE" --version="$version"
}
copy() (
  trap 'do_it rm -f spsjax.tar.gz' EXIT
  do_it git archive --format=tar.gz --prefix=spsjax/ --output=spsjax.tar.gz HEAD
  tpu scp spsjax.tar.gz "$TPU": --worker=all
  tpu ssh "$TPU" --worker=all --command="tar xzf spsjax.tar.gz"
)
# The slice's own Python is older than 3.11.
install() {
  everywhere "python3 -m pip install --quiet --user uv && python3 -m uv venv --quiet --python 3.12 &&\
 python3 -m uv pip install --quiet 'jax[tpu]' --editable '.[all]'"
}
run() { everywhere "source .venv/bin/activate && mkdir -p $RESULTS && $COMMAND"; }
collect() { tpu scp --recurse "$TPU:spsjax/$RESULTS" . --worker=0; }
delete() { tpu delete "$TPU" --quiet; }

all() {
  if [ "${RUN:-}" = 1 ] &&
    gcloud compute tpus tpu-vm describe "$TPU" --zone="$ZONE" >/dev/null 2>&1; then
    echo "TPU: expected the name of a slice that is not there yet, found '$TPU'" >&2
    return 1
  fi
  [ -n "${VERSION:-}" ] || version >/dev/null
  trap delete EXIT
  create
  copy
  install
  run
  collect
}

[[ $RESULTS =~ ^[A-Za-z0-9_][A-Za-z0-9_./-]*$ ]] || {
  echo "RESULTS: expected a relative folder without spaces, found '$RESULTS'" >&2
  exit 1
}
[ $# -le 1 ] || { echo "step: expected one, found $#: $*" >&2; exit 1; }
case ${1:-} in
  create | copy | install | run | collect | delete | all) "$1" ;;
  *) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 1 ;;
esac
