#!/usr/bin/env bash
# Plays a newcomer's first hour in a folder of its own, with megappo installed from a wheel into a fresh environment, whose libraries
# are those of the repository's: the task of docs/own_task.md as the page has it, then the mistakes that newcomers made. Prints PASS
# or FAIL, the seconds and what was seen for each step; the exit code is 1 if one failed. Two minutes on two cores.
# Usage: scripts/first_hour.sh WHEEL [FOLDER]      WHEEL: of `pip wheel --no-deps --no-build-isolation -w dist .`; FOLDER is new and is
# kept; without one all is removed.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
python=$(realpath -s "${MEGAPPO_VENV:-.venv}")/bin/python
wheel=${1:?first_hour: a wheel of megappo is needed}
if [ $# -gt 1 ]; then
  mkdir "$2"
  folder=$(realpath "$2")
else
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
fi
unset PYTHONPATH  # the wheel's package is to be found, not this one
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
failed=0

# step NAME CODE PATTERN COMMAND...: the command ends with this code, and a line that it prints matches the pattern. No traceback,
# unless a fault is what is played (code 1).
step() {
  local name=$1 want=$2 pattern=$3 begun=$SECONDS code=0 verdict=PASS seen=''
  shift 3
  timeout 300 "$@" >"$folder/said" 2>&1 || code=$?
  seen=$(grep -aEm1 -- "$pattern" "$folder/said") && [ "$code" = "$want" ] || verdict=FAIL
  if [ "$want" != 1 ] && grep -q '^Traceback' "$folder/said"; then verdict=FAIL; fi
  printf '%s %3d s  %s: %s\n' $verdict $((SECONDS - begun)) "$name" "${seen:0:200}"
  if [ $verdict = FAIL ]; then
    failed=1
    echo "     exit code $code, wanted $want and /$pattern/; it printed:"
    tail -n 30 "$folder/said" | sed 's/^/     | /'
  fi
}

# mistake NAME PATTERN COMMAND...: refused with code 2 in one line, before torch is imported.
mistake() {
  step "$1" 0 "$2" bash -c '
    PYTHONPROFILEIMPORTTIME=1 "$@" >lines 2>&1
    code=$?
    grep -v "^import time:" lines
    [ $code = 2 ] && [ "$(grep -cv "^import time:" lines)" = 1 ] && ! grep -q "| *torch$" lines' _ "${@:3}"
}

install() {
  "$python" -m venv --without-pip "$folder/venv"
  "$python" -m pip --disable-pip-version-check --python "$folder/venv/bin/python" install -q --no-deps "$wheel"
  # The libraries come after megappo, and no .pth file of theirs is read: the repository's editable install is not among them.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$(echo "$folder"/venv/lib/python*/site-packages)/libraries.pth"
}
export -f install
export repository python folder wheel

# Of docs/own_task.md: a block of code by its language, and the indented command that begins with these words.
block() { sed -n "/^\`\`\`$1\$/,/^\`\`\`\$/p" "$repository/docs/own_task.md" | sed '1d;$d'; }
command_of() { sed -n "s/^    \($1.*\)/\1/p" "$repository/docs/own_task.md" | sed 's/  #.*//'; }
page() { step "$1" 0 "$2" bash -c "$(command_of "$3")${4:-}"; }

step "install" 0 '^installed' bash -euc 'install; echo "installed $(basename "$wheel")"'
export PATH=$folder/venv/bin:$PATH
mkdir "$folder/work"
cd "$folder/work"
step "megappo is the wheel's" 0 "^$folder/venv" python -c 'import megappo; print(megappo.__file__)'
step "its kernels" 0 'C[+][+]' python -m megappo.ops.implementations
step "its recipes" 0 '^algorithm:' megappo config --recipe grpo

# -------------------------------------------------------------------------------------------------------- a task of one's own
step "the quickstart's model, untrained" 0 '^model: llama' python "$repository/scripts/quickstart_model.py" runs/quickstart
mkdir -p runs/quickstart/sft
mv runs/quickstart/model runs/quickstart/sft/export
block python >reward.py
# Two steps, and Megatron's engine generates, which starts ten seconds sooner: `megappo generate` below starts vLLM's.
block yaml | sed 's/steps: [0-9]*/steps: 2/; s/^rollout: {/rollout: {engine: megatron, /' >run.yaml
[ "$(sed -n '/^def/,/return/p' reward.py | wc -l)" -le 6 ] && [ "$(wc -l <run.yaml)" -le 10 ] \
  || { failed=1; echo "FAIL        the page promises a reward of six lines and a configuration of ten"; }
page "records" '^400 task.jsonl' 'python -c' ' && wc -l task.jsonl'
page "plan" 'run: 2 steps' 'megappo plan'
page "train, and its summary" '^training score: .* at step 1 -> .* at step 2$' 'megappo train'
page "trajectories" '^runs/close: .* samples of step 2$' 'megappo trajectories'
page "generate from the run" '.' 'megappo generate'
page "export" '^model.safetensors$' 'megappo export' ' && ls close-model'

# --------------------------------------------------------------------------------------------------------------- mistakes
mistake "generate: no such model" 'not a directory' megappo generate runs/nothing --prompt x
mistake "plan: no such model" 'policy.model = "runs/nothing": ' megappo plan run.yaml policy.model=runs/nothing
mistake "plan: no such data" 'data file nothing.jsonl does not exist' megappo plan run.yaml data.train=nothing.jsonl
mistake "export: no such run" 'holds no run' megappo export runs/nothing out
mistake "a misspelt key" 'did you mean policy.optimizer.lr' megappo plan run.yaml policy.optimizer.lrr=1
step "dead keys are refused together, with what clears them" 2 'to clear .* critic.dtype=null .*algorithm.lam=null' \
  megappo plan run.yaml algorithm.estimator=grpo
step "a name that is taken" 2 'use run.name=close-2 ' megappo train run.yaml
printf 'def bad(sample):\n    return 1 / 0\n' >bad.py
step "a reward that fails" 1 'ZeroDivisionError: .* \(bad.py:2\)' \
  megappo train run.yaml run.num_ranks=1 policy.parallel.tp=1 run.name=second \
  'reward.parts=[{path: bad.py, function: bad}]'
step "runs: why it failed, in one line" 0 '^  second: .*ZeroDivisionError' megappo runs runs
exit $failed
