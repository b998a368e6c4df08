#!/usr/bin/env bash
# Sets up an environment and runs PPO from nothing to a trained model, on a machine without a GPU, in minutes.
# Everything is written below runs/quickstart (the next free name if that exists). Arguments are overrides of configs/quickstart.yaml,
# for example: scripts/quickstart.sh trainer.steps=10
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

scripts/setup_env.sh
venv=${MEGAPPO_VENV:-.venv}
installed=$SECONDS

dir=runs/quickstart
n=2
while [ -e "$dir" ]; do dir=runs/quickstart-$n; n=$((n + 1)); done
say() { printf '\n=== %s\n' "$*"; }

say "1/3 model, tokenizer and data in $dir"
TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1 "$venv/bin/python" scripts/quickstart_model.py "$dir"

say "2/3 supervised warm-up (policy tp=2)"
"$venv/bin/megappo" sft configs/quickstart_sft.yaml run.output_dir="$dir" policy.model="$dir/model" \
  data.train="$dir/data/sft.jsonl" data.tokenizer="$dir/model/tokenizer.model"

say "3/3 PPO (policy tp=2, critic pp=2, vLLM, on the same two ranks)"
"$venv/bin/megappo" train configs/quickstart.yaml run.output_dir="$dir" policy.model="$dir/sft/export" \
  data.train="$dir/data/train.jsonl" data.eval="$dir/data/eval.jsonl" data.tokenizer="$dir/model/tokenizer.model" "$@"

say "done in $((SECONDS - started)) s ($((installed - started)) s of them set-up)"
"$venv/bin/python" -m megappo.telemetry.summary "$dir/ppo"
echo "try it:              $venv/bin/megappo generate $dir/ppo/export --tokenizer $dir/model/tokenizer.model \\
                     --raw --dtype fp32 --prompt 347+8= --max-tokens 6"
