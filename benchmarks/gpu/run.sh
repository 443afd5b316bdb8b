#!/usr/bin/env bash
# One call of under ten minutes on a machine with a GPU, PyTorch and Triton; no network. `--dry` runs all of it on a CPU.
# Results go to benchmarks/results/, or to the folder after --out.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
case " $* " in *" --dry "*) export TRITON_INTERPRET=1 ;; esac
exec "$python" -m benchmarks.gpu "$@"
