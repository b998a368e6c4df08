#!/usr/bin/env bash
# Checks formatting, lint and types: scripts/lint.sh [format] [lint] [types]      (all three without arguments; nothing is changed)
# Runs in the environment of test.sh, which it sets up: types depend on the versions of the libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- format lint types
scripts/setup_env.sh --test
python=${MEGAPPO_VENV:-.venv}/bin/python
for check in "$@"; do
  case $check in
    format) "$python" -m ruff format --check . ;;
    lint) "$python" -m ruff check . ;;
    types) "$python" -m pyright --pythonpath "$python" ;;
    *) echo "lint: $check: use format, lint or types" >&2; exit 2 ;;
  esac
done
