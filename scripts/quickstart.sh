#!/usr/bin/env bash
# Sets up .venv if need be, and shows speculative sampling with the shipped models: text, and a table
# of its speed beside autoregressive sampling's. With --target=smollm2 a chat model is downloaded
# and asked (--prompt="..."). PYTHON=python3.13 takes another interpreter.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"
"$VENV/bin/python" scripts/quickstart.py "$@"
echo "Before other Python scripts: source $VENV/bin/activate"
