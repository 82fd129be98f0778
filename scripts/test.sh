#!/usr/bin/env bash
# Sets up .venv if need be, and runs the tests: all of them, by two processes, or what pytest is told
# by the arguments (paths are the repository's). PYTHON=python3.13 bash scripts/test.sh takes another
# interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
[ $# -gt 0 ] || set -- --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=10
exec "$VENV/bin/python" -m pytest "$@"
