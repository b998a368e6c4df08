#!/bin/bash
# Builds TransformerEngine's part for PyTorch against the torch of an environment, and checks that it imports.
# Its wheels hold the CUDA kernels; the part that links against torch is compiled here: about 17 minutes on 2 cores.
set -euo pipefail

usage() {
    cat <<TEXT
usage: scripts/install_transformer_engine.sh [--dry-run] [--python PYTHON] [--version X.Y.Z] [--archs 80;90] [--jobs N]

  --dry-run   print the command and the include folders, and do nothing
  --python    interpreter of the environment to install into (default: python); it must have a CUDA build of torch
  --version   of TransformerEngine (default: $VERSION; megappo takes >=2.11,<2.21)
  --archs     compute capabilities to compile for, 100 for Blackwell (default: 80;90)
  --jobs      compilers at once, each takes about 4 GiB (default: one per 4 GiB of free memory, at most one per core)

Needs nvcc of torch's major version of CUDA (CUDA_HOME, or nvcc on PATH), g++, and ninja, pybind11, packaging (installed if absent).
TEXT
}

VERSION=2.11.0 PYTHON=python ARCHS="80;90" JOBS="" DRY_RUN=""
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) usage; exit 0 ;;
        --dry-run) DRY_RUN=1; shift; continue ;;
        --python | --version | --archs | --jobs) [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; } ;;
        *) echo "unknown option $1; see --help" >&2; exit 2 ;;
    esac
    case $1 in
        --python) PYTHON=$2 ;;
        --version) VERSION=$2 ;;
        --archs) ARCHS=$2 ;;
        --jobs) JOBS=$2 ;;
    esac
    shift 2
done

# Where torch's own wheels keep the headers that TransformerEngine includes: cu13/ (CUDA 13) or a folder per library (CUDA 12).
FACTS=$("$PYTHON" - <<'PY'
import os
from importlib.util import find_spec

import torch

if torch.version.cuda is None:
    raise SystemExit(f"torch {torch.__version__} is a build for the CPU: pip install 'torch==={torch.__version__.split('+')[0]}' first")
major = torch.version.cuda.split(".")[0]
spec = find_spec("nvidia")
roots = list(spec.submodule_search_locations) if spec else []
folders = [os.path.join(root, name, "include") for root in roots for name in sorted(os.listdir(root))]
wanted = [f for f in folders if os.path.isdir(f) and os.path.basename(os.path.dirname(f)) not in ("cusparselt", "nvshmem")]
for header in ("cudnn.h", "nccl.h", "cublas_v2.h"):
    if not any(os.path.exists(os.path.join(f, header)) for f in wanted):
        raise SystemExit(f"{header} is in none of {wanted or 'no folder of nvidia wheels'}: pip install nvidia-cudnn-cu{major} nvidia-nccl-cu{major}")
print(major, ":".join(wanted))
PY
) || exit 2
MAJOR=${FACTS%% *} INCLUDES=${FACTS#* }

if [ -z "${CUDA_HOME:-}" ]; then
    NVCC=$(command -v nvcc) || { echo "nvcc not found: install the CUDA $MAJOR toolkit and set CUDA_HOME" >&2; exit 2; }
    # Asked of nvcc itself: the file on PATH may be a script that calls another one.
    CUDA_HOME=$("$NVCC" --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p' | head -1)
    CUDA_HOME=$(cd "${CUDA_HOME:-$(dirname "$NVCC")/..}" && pwd)
fi
TOOLKIT=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
if [ "$TOOLKIT" != "$MAJOR" ]; then
    echo "nvcc in $CUDA_HOME is of CUDA $TOOLKIT, torch of CUDA $MAJOR: set CUDA_HOME to a toolkit of CUDA $MAJOR" >&2
    exit 2
fi
if [ -z "$JOBS" ]; then
    JOBS=$(awk -v cores="$(nproc)" '/MemAvailable/ { n = int($2 / 4194304); if (n > cores) n = cores; if (n < 1) n = 1; print n }' /proc/meminfo)
fi

SETTINGS=(
    "NVTE_FRAMEWORK=pytorch" "NVTE_BUILD_USE_NVIDIA_WHEELS=1" "NVTE_CUDA_ARCHS=$ARCHS" "MAX_JOBS=$JOBS" "CUDA_HOME=$CUDA_HOME"
    "CPLUS_INCLUDE_PATH=$INCLUDES${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
)
INSTALL=("$PYTHON" -m pip install --no-build-isolation "transformer_engine[pytorch,core_cu$MAJOR]==$VERSION")
printf 'env'
printf ' %q' "${SETTINGS[@]}" "${INSTALL[@]}"
printf '\n'
[ -z "$DRY_RUN" ] || exit 0

"$PYTHON" -m pip install --quiet ninja pybind11 packaging
# torch's builds take ninja from PATH, where an environment that is not activated is not, and compile one file at a time without.
bin=$("$PYTHON" -c 'import os, sys; print(os.path.dirname(sys.executable))')
PATH="$bin:$PATH" env "${SETTINGS[@]}" "${INSTALL[@]}"
"$PYTHON" -c "
import transformer_engine.pytorch
from importlib.metadata import version
print('TransformerEngine', version('transformer_engine'), 'imports')"
