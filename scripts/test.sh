#!/usr/bin/env bash
# Sets up the environment (once) and runs the tests. Arguments go to pytest: scripts/test.sh tests/ops -k gae
# scripts/test.sh --gpu runs the tests that need CUDA, in the environment that MEGAPPO_VENV names (see the README for its packages).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--gpu" ]; then
  shift
  exec "${MEGAPPO_VENV:?name the environment that holds CUDA torch}/bin/python" -m pytest -q -m gpu "${@:-tests}"
fi
scripts/setup_env.sh --test
venv=${MEGAPPO_VENV:-.venv}
# One thread per process: the worlds of the tests are several processes on few cores.
export OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -q "${@:-tests}"
