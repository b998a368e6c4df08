#!/usr/bin/env bash
# Builds the documentation site into build/docs. A warning (broken link, page in no menu, unknown heading) is an error: exit code 1.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup_env.sh --test
python=${MEGAPPO_VENV:-.venv}/bin/python
"$python" scripts/draw_architecture.py --check
"$python" -m sphinx -q -W --keep-going -b html docs build/docs
echo "docs: build/docs/index.html"
