#!/usr/bin/env bash
# The first run on a machine with GPUs: everything that only a GPU can tell, in one command. Each part fails alone; at the end stand a
# folder with every log and report.md, one page for an issue, whole whenever the run is stopped. About an hour on one GPU.
#   scripts/first_gpu_run.sh [--out DIR] [--minutes 12] [--only doctor,bench] [--quick] [--rehearse]     --help lists the parts
#   scripts/first_gpu_run.sh --into-docs DIR     puts the tables of a run into docs/gpu.md
# It runs in the environment that MEGAPPO_VENV names, otherwise in that of the `python` on PATH, and installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${MEGAPPO_VENV:+$MEGAPPO_VENV/bin/}python
command -v "$python" >/dev/null || { echo "first_gpu_run: $python not found; name the environment: MEGAPPO_VENV=DIR" >&2; exit 2; }
exec "$python" -m scripts.gpu_run "$@"
