#!/usr/bin/env bash
# Sets up .venv if need be, and tests:
#   bash scripts/test.sh                      the gate: style, types, and what a change must pass
#   bash scripts/test.sh --full               the gate, and everything that is long
#   bash scripts/test.sh tests/decode -x      what pytest is told by the arguments
# PYTHON=python3.13 bash scripts/test.sh takes another interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
together=(--numprocesses=auto --dist=loadgroup --no-loadscope-reorder --durations=15)
case "${1:-}" in
  "") tier=gate ;;
  --full) tier=full && shift ;;
  *) exec "$VENV/bin/python" -m pytest "$@" ;;
esac
"$VENV/bin/python" -m ruff check .
"$VENV/bin/python" -m ruff format --check .
"$VENV/bin/python" -m mypy
exec "$VENV/bin/python" -m pytest --tier="$tier" "${together[@]}" "$@"
