#!/usr/bin/env bash
# The models before PPO and PPO itself, from nothing, on a machine without a GPU: fine-tunes a small llama on sums with a
# mistake (the quickstart's), lets it answer, makes preference pairs of right and wrong answers, trains a reward model on them, then PPO
# against that reward model, whose critic starts from it, and DPO on the same pairs. Says how many held-out sums each adds up.
#   scripts/pipeline.sh [--out DIR] [--seed N] [--dry-run]
# --out DIR: where everything is written; otherwise runs/pipeline. A second call goes on there: what has finished stays, a run that was
# stopped (Ctrl-C) resumes from its checkpoint, or begins again if it has none. --seed N: run.seed of every stage. --dry-run: prints the
# commands.
set -euo pipefail
cd "$(dirname "$0")/.."

dir=runs/pipeline seed=0 dry=
while [ $# -gt 0 ]; do
  case "$1" in
    --out) dir=${2:?pipeline: --out needs a directory}; shift 2 ;;
    --seed) seed=${2:?pipeline: --seed needs a number}; shift 2 ;;
    --dry-run) dry=1; shift ;;
    *) echo "pipeline: $1: unknown option; see the head of scripts/pipeline.sh" >&2; exit 2 ;;
  esac
done
[ -n "$dry" ] || scripts/setup_env.sh
python=${MEGAPPO_VENV:-.venv}/bin/python
export TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1

say() { printf '\n=== %s\n' "$*"; }

# stage NAME WHAT COMMAND...: runs it unless it has finished here, and keeps its seconds.
stage() {
  local name=$1 begun=$SECONDS
  say "$2"
  shift 2
  if [ -n "$dry" ]; then printf '%q ' "$@"; echo; return; fi
  if [ -e "$dir/seconds/$name" ]; then echo "there from an earlier call"; return; fi
  "$@"
  mkdir -p "$dir/seconds"
  echo $((SECONDS - begun)) >"$dir/seconds/$name"
}

# train NAME WHAT COMMAND CONFIG KEY=VALUE...: a stage that is a run, and resumes if it was stopped.
train() {
  local name=$1 what=$2 resume=()
  if compgen -G "$dir/$name/checkpoints/step-*" >/dev/null; then
    resume=(--resume)
  elif [ -z "$dry" ] && [ ! -e "$dir/$name/lease.json" ] && [ ! -e "$dir/seconds/$name" ]; then
    rm -rf "${dir:?}/$name"  # stopped before its first checkpoint
  fi
  shift 2
  stage "$name" "$what" "$python" -P -m megappo "$@" "run.output_dir=$dir" "run.seed=$seed" "data.tokenizer=$dir/model/tokenizer.model" \
    "${resume[@]}"
}

# evaluate NAME: greedy answers of a run's policy to the held-out sums, of which none was trained on.
evaluate() {
  stage "eval-$1" "held-out sums: $1" "$python" -P -m megappo eval "$dir/$1/export" configs/quickstart.yaml \
    "policy.model=$dir/sft/export" "data.train=$dir/data/train.jsonl" "data.eval=$dir/data/eval.jsonl" \
    "data.tokenizer=$dir/model/tokenizer.model" -o "$dir/eval-$1.json"
}

stage model "1/6 model, tokenizer and data in $dir" "$python" scripts/quickstart_model.py "$dir"
# It answers the held-out sums itself (the policy generates), before, halfway and at the end.
train sft "2/6 fine-tuning (policy tp=2)" sft configs/quickstart_sft.yaml "policy.model=$dir/model" "data.train=$dir/data/sft.jsonl" \
  "data.eval=$dir/data/eval.jsonl" trainer.eval_every=150 rollout.engine=megatron rollout.max_response_tokens=6 \
  "reward.parts=[{name: exact_match}]"
stage pairs "3/6 answers of the fine-tuned model, and pairs of them" "$python" scripts/preference_pairs.py "$dir"
train reward_model "4/6 reward model (tp=2)" train-reward-model configs/quickstart_reward_model.yaml \
  "reward_model.model=$dir/sft/export" "data.train=$dir/data/pairs.jsonl" "data.eval=$dir/data/held_out_pairs.jsonl"
# The reward of training is the reward model's score alone; whether sums are right is only watched.
train ppo "5/6 PPO against the reward model (policy tp=2, critic pp=2, from the reward model)" train configs/quickstart.yaml \
  "policy.model=$dir/sft/export" "data.train=$dir/data/train.jsonl" data.eval=null \
  "evaluations={sums: {data: $dir/data/eval.jsonl, reward: {parts: [{name: exact_match}]}}}" \
  "reward.parts=[{model: reward_model}]" "reward_model.model=$dir/reward_model/export" reward_model.dtype=fp32 \
  reward_model.chat_template=false algorithm.kl.coef=0.05 "critic.model=$dir/reward_model/export" critic.value_head=checkpoint
train dpo "6/6 DPO on the same pairs (policy tp=2)" dpo configs/quickstart_dpo.yaml \
  "policy.model=$dir/sft/export" "data.train=$dir/data/pairs.jsonl" "data.eval=$dir/data/held_out_pairs.jsonl"
for name in dpo ppo; do evaluate "$name"; done
stage curves "curves" "$python" -P -m megappo compare "$dir/reward_model" "$dir/dpo" "$dir/ppo" --metric eval/accuracy \
  --metric eval/sums/mean@1 --metric reward/score_mean --plot "$dir/curves.svg"
[ -z "$dry" ] || exit 0

# percent FILE METRIC: its last value there.
percent() { grep -o "\"$2\": [0-9.e-]*" "$1" | tail -n 1 | awk '{printf "%.1f %%", 100 * $2}'; }
row() { printf '%-58s %8s %6s s\n' "$1" "$2" "$3"; }
seconds() { cat "$dir/seconds/$1"; }
say "500 held-out sums, answered greedily"
row "fine-tuned, with a mistake" "$(percent "$dir/sft/metrics.jsonl" eval/score)" "$(seconds sft)"
row "DPO" "$(percent "$dir/eval-dpo.json" eval/score)" "$(seconds dpo)"
row "PPO against the reward model" "$(percent "$dir/eval-ppo.json" eval/score)" "$(seconds ppo)"
row "pairs of held-out sums that the reward model orders rightly" "$(percent "$dir/reward_model/metrics.jsonl" eval/accuracy)" \
  "$(seconds reward_model)"
row "answers for $(wc -l <"$dir/data/pairs.jsonl") pairs" - "$(seconds pairs)"
