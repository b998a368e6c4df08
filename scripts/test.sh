#!/usr/bin/env bash
# Sets up the environment (once) and runs the tests. Arguments go to pytest: scripts/test.sh tests/ops -k gae
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_env.sh --test
venv=${MEGAPPO_VENV:-.venv}
# One thread per process: the worlds of the tests are several processes on few cores.
export OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -q "${@:-tests}"
