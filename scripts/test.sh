#!/usr/bin/env bash
# Sets up the environment (once) and runs the tests. Arguments go to pytest: scripts/test.sh tests/ops -k gae
# scripts/test.sh --quick leaves out worlds, vLLM, Slurm, compilers and the environment with a CUDA torch: 3 minutes on 2 cores.
# scripts/test.sh --gpu runs the tests that need CUDA, in the environment that MEGAPPO_VENV names, else with the `python` on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = "--gpu" ]; then
  shift
  exec "${MEGAPPO_VENV:+$MEGAPPO_VENV/bin/}python" -m pytest -q -m gpu "${@:-tests}"
fi
# Whole: three workers on two cores, because ranks wait for each other, and tests of hangs and time-outs for time, a seventh of it.
quick='' workers=3
if [ "${1:-}" = "--quick" ]; then
  shift
  quick=1 workers=2
fi
scripts/setup_env.sh --test
venv=${MEGAPPO_VENV:-.venv}
# Installs packages of Debian, if this is root: without them tests are skipped, or fail, and say so.
debian() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
  echo "[test] installing $*"
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@"; } >/dev/null 2>&1 \
    || echo "[test] $* could not be installed" >&2
}
# Programs of code rewards run in it.
command -v bwrap >/dev/null || debian bubblewrap
# The tests of the launch submit jobs to a real Slurm of two nodes, which they start themselves.
slurm_is_here() {
  for program in slurmctld slurmd munged sbatch; do PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || return; done
}
[ -n "$quick" ] || slurm_is_here || debian slurm-wlm munge
# The page of `megappo trajectories` is opened in a browser (110 MB, half a minute).
[ -n "$quick" ] || command -v chromium google-chrome >/dev/null || debian chromium
# The tests of the GPU stack and of whole runs on it need a CUDA build of torch (5 GB), on a machine without a GPU too. Where it
# cannot be made they are skipped and say why.
needs_cuda_torch() {
  local argument
  for argument in "$@"; do
    case $argument in tests | tests/ | tests/host_cuda* | tests/scripts*) return 0 ;; esac
  done
  [ $# = 0 ]
}
build=''
if [ -z "$quick" ] && needs_cuda_torch "$@"; then
  # Beside the other tests: it takes minutes, and those that need it wait for it (--existing). A session of its own, to be ended whole.
  setsid bash -c 'scripts/setup_cuda_env.sh --optional \
    || echo "[test] the environment with a CUDA torch could not be made: see above" >&2' &
  build=$!
  trap 'kill -- "-$build" 2>/dev/null || true' EXIT
fi
# Hundreds of processes import megappo: they compile it once.
unset PYTHONDONTWRITEBYTECODE
code=0
"$venv/bin/python" -m pytest -q -n "$workers" --no-loadscope-reorder ${quick:+--quick} "${@:-tests}" || code=$?
[ -z "$build" ] || wait "$build"
exit "$code"
