#!/usr/bin/env bash
# Creates the environment of a machine with GPUs, also where there is none: CUDA torch, Megatron-core, vLLM's GPU wheel, and
# megappo with its CUDA kernels, built from a copy of this checkout in $venv/src. The checkout's own library is not touched.
# Usage: scripts/setup_cuda_env.sh [--optional] [--existing] [--transformer-engine]
#   --optional             exits 0 where the environment cannot be made; otherwise 2. One line says why in both cases.
#   --existing             makes none: waits for one that is being made, exits 3 and says so where there is none, otherwise copies and
#                          builds what changed.
#   --transformer-engine   compiles TransformerEngine too (about 17 minutes on 2 cores), once.
# The environment is .venv-cuda in the repository, or $MEGAPPO_CUDA_VENV; its Python $MEGAPPO_CUDA_PYTHON, else python3.12, else
# python3.11. A new one wants $MEGAPPO_CUDA_FREE_GIB (16) of free disk. Finished installs are marked: a second call copies changed
# files, and compiles again when csrc/ or setup.py changed.
set -euo pipefail
cd "$(dirname "$0")/.."

optional='' existing='' transformer_engine=''
for option in "$@"; do
  case $option in
    --optional) optional=1 ;;
    --existing) existing=1 ;;
    --transformer-engine) transformer_engine=1 ;;
    *) echo "setup-cuda: $option: use --optional, --existing or --transformer-engine" >&2; exit 2 ;;
  esac
done

unset PYTHONPATH   # the environment's packages, not those of another one
venv=${MEGAPPO_CUDA_VENV:-.venv-cuda}
free_gib=${MEGAPPO_CUDA_FREE_GIB:-16}   # 9 for the environment, the rest for pip's downloads while it installs

say() { printf '[setup-cuda %3ds] %s\n' "$SECONDS" "$*"; }
skip() { echo "setup-cuda: skipped: $*" >&2; [ -n "$optional" ] && exit 0; exit 2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
hash_of() { sha256sum | cut -c1-16; }
# Relative names would lead into the copy, where megappo is installed from.
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
venv=$(absolute "$venv")

# python3.12 first: GPU containers ship it. pyenv leaves a command of every Python it has, which fails for one that is not chosen.
runs() { [ -n "$1" ] && "$1" -c '' 2>/dev/null; }
of_pyenv() { PYENV_VERSION=$(pyenv latest "${1#python}" 2>/dev/null) pyenv which "$1" 2>/dev/null || true; }
python=${MEGAPPO_CUDA_PYTHON:-}
for name in python3.12 python3.11; do
  [ -n "$python" ] || { runs "$name" && python=$name; } || python=$(of_pyenv "$name")
done

libraries="$venv/.megappo-cuda-$(cat requirements/cuda.txt requirements/constraints-cuda.txt | hash_of)"
if [ -n "$existing" ]; then
  [ ! -e "$venv/.lock" ] || { exec 9>"$venv/.lock"; flock 9; }
  if [ ! -e "$libraries" ]; then
    echo "setup-cuda: there is no finished environment in $venv (scripts/setup_cuda_env.sh makes it)" >&2
    exit 3
  fi
fi

nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
[ -n "$nvcc" ] && [ -x "$nvcc" ] || nvcc=$(command -v nvcc) || skip "nvcc was not found (set CUDA_HOME or PATH to a CUDA toolkit)"
command -v g++ >/dev/null || skip "g++ was not found (Debian: apt-get install g++)"

mkdir -p "$venv"
exec 9>"$venv/.lock"
flock 9   # two workers of the tests may ask for it at once

if [ ! -e "$libraries" ]; then
  runs "$python" || skip "no Python runs as ${MEGAPPO_CUDA_PYTHON:-python3.12 or python3.11} (set MEGAPPO_CUDA_PYTHON)"
  free=$(($(df -Pk "$venv" | awk 'NR == 2 { print $4 }') / 1048576))
  [ "$free" -ge "$free_gib" ] || skip "$free GiB are free in $venv, $free_gib are needed"
  if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv with $("$python" --version)"
    "$python" -m venv "$venv" || skip "$python makes no environment (Debian: apt-get install python3-venv)"
  fi
  # By megappo's own table, which imports nothing: like "torch===2.13.0" and "vllm==0.32.0".
  of_table() { "$python" -c "from megappo.runtime.versions import cuda_torch, pinned; print($1)"; }
  torch=$(of_table 'cuda_torch()') vllm=$(of_table 'pinned("vllm")') megatron=$(of_table 'pinned("megatron-core")')
  say "$torch (CUDA)"
  pip install "$torch" -c requirements/constraints-cuda.txt \
    || skip "a CUDA build of torch ${torch#*===} is not to be had: see above"
  "$venv/bin/python" -W ignore -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
    || skip "pip took a torch without CUDA (pip install '$torch')"
  say "$vllm (GPU)"
  pip install "$torch" "$vllm" -c requirements/constraints-cuda.txt
  say "$megatron and libraries"
  pip install --no-deps "$megatron"
  pip install "$torch" -r requirements/cuda.txt -c requirements/constraints-cuda.txt
  touch "$libraries"
fi

if [ -n "$transformer_engine" ] && ! "$venv/bin/python" -c 'import transformer_engine.pytorch' 2>/dev/null; then
  say "TransformerEngine, compiled for this Python and torch"
  # PATH: ninja is in the environment. One architecture: nothing of it runs here, and each costs minutes.
  PATH="$venv/bin:$PATH" scripts/install_transformer_engine.sh --python "$venv/bin/python" --archs 90
fi

"$venv/bin/python" scripts/gpu_stack/sync.py "$venv/src" >/dev/null
sources() { cd "$venv/src"; for file in setup.py pyproject.toml megappo/runtime/versions.py megappo/runtime/versions.py; do [ ! -e $file ] || cat $file; done
  find csrc -type f -not -path '*/__pycache__/*' | sort | xargs cat; "$nvcc" --version; echo "${MEGAPPO_CUDA_ARCHS:-}"; }
built="$venv/.megappo-built-$( (sources) | hash_of)"
if [ ! -e "$built" ]; then
  rm -f "$venv"/.megappo-built-*
  say "megappo and its CUDA kernels, by the README's line for GPUs"
  (cd "$venv/src" \
    && MEGAPPO_CUDA=1 pip install --no-build-isolation -e '.[vllm,math]' -c requirements/constraints-cuda.txt)
  touch "$built"
  say "$(cd "$venv/src" && "$venv/bin/python" -m megappo.ops.implementations)"
fi
