#!/usr/bin/env bash
# Checks what of the GPU stack can be checked without a GPU, in the environment of scripts/setup_cuda_env.sh, and prints a table.
# Usage: scripts/check_gpu_stack.sh [--transformer-engine] [--json FILE] [--only GROUP]     Exit status 1 if a check FAILED.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."

setup=()
arguments=()
file_follows=''
for argument in "$@"; do
  [ "$argument" = --transformer-engine ] && setup=(--transformer-engine)
  # The checks run in the copy of this checkout that the environment is built from.
  if [ -n "$file_follows" ] && [ "${argument#/}" = "$argument" ]; then argument=$caller/$argument; fi
  file_follows=''
  [ "$argument" = --json ] && file_follows=1
  arguments+=("$argument")
done
scripts/setup_cuda_env.sh "${setup[@]}"
venv=$(realpath "${MEGAPPO_CUDA_VENV:-.venv-cuda}")
cd "$venv/src"
# Nothing here may find a device, so that the result is the same on machines that have one. One thread: two groups run at a time.
unset PYTHONPATH
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
exec "$venv/bin/python" -W ignore -m scripts.gpu_stack.main "${arguments[@]}"
