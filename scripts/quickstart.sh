#!/usr/bin/env bash
# Sets up an environment and runs PPO from nothing to a trained model, on a machine without a GPU, in minutes.
#   scripts/quickstart.sh [--images] [--gpu N] [--out DIR] [--sft-steps N] [KEY=VALUE ...]    for example: scripts/quickstart.sh trainer.steps=10
# --gpu N: the same on N GPUs (1 or 2), in the environment that MEGAPPO_VENV names, else that of the `python` on PATH (docs/gpu.md);
# nothing is installed then.
# --images: a small vision-language model learns to count squares in pictures, instead of a language model that adds (docs/images.md).
# --out DIR: where everything is written; otherwise runs/quickstart, or the next free name. --sft-steps N: steps of the supervised
# warm-up, for a shorter run. KEY=VALUE: overrides of configs/quickstart.yaml.
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

gpus= dir= warm_up=() task=
while :; do
  case "${1:-}" in
    --gpu) gpus=${2:-}; [[ $gpus =~ ^[12]$ ]] || { echo "quickstart: --gpu $gpus: 1 or 2 GPUs" >&2; exit 2; }; shift 2 ;;
    --images) task=_images; shift ;;
    --out) dir=${2:?quickstart: --out needs a directory}; shift 2 ;;
    --sft-steps) warm_up=("trainer.steps=${2:?quickstart: --sft-steps needs a number}"); shift 2 ;;
    -*) echo "quickstart: $1: unknown option; see the head of scripts/quickstart.sh" >&2; exit 2 ;;
    *) break ;;
  esac
done

layout=() critic_layout=()  # the configurations' own: policy tp=2, critic pp=2 on two CPU ranks
if [ -n "$gpus" ]; then
  python=${MEGAPPO_VENV:+$MEGAPPO_VENV/bin/}python
  layout=(run.device=cuda "run.num_ranks=$gpus" "policy.parallel.tp=$gpus")
  critic_layout=("critic.parallel.pp=$gpus")
else
  scripts/setup_env.sh
  python=${MEGAPPO_VENV:-.venv}/bin/python
fi
installed=$SECONDS

if [ -z "$dir" ]; then
  first=runs/quickstart${task/_/-} n=2
  dir=$first
  while [ -e "$dir" ]; do dir=$first-$n; n=$((n + 1)); done
fi
ranks=${gpus:-2}
make_model=scripts/quickstart_model.py tokenizer=("data.tokenizer=$dir/model/tokenizer.model") pictures=()
if [ -n "$task" ]; then
  make_model=scripts/quickstart_images.py tokenizer=() pictures=("data.image_root=$dir/pictures")
fi
say() { printf '\n=== %s\n' "$*"; }

say "1/3 model, tokenizer and data in $dir"
TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1 "$python" "$make_model" "$dir"

say "2/3 supervised warm-up (policy tp=$ranks)"
"$python" -P -m megappo sft "configs/quickstart${task}_sft.yaml" run.output_dir="$dir" policy.model="$dir/model" \
  data.train="$dir/data/sft.jsonl" "${tokenizer[@]}" "${pictures[@]}" "${layout[@]}" "${warm_up[@]}"

say "3/3 PPO (policy tp=$ranks, critic pp=$ranks, vLLM, on the same ranks)"
"$python" -P -m megappo train "configs/quickstart${task}.yaml" run.output_dir="$dir" policy.model="$dir/sft/export" \
  data.train="$dir/data/train.jsonl" data.eval="$dir/data/eval.jsonl" "${tokenizer[@]}" "${pictures[@]}" \
  "${layout[@]}" "${critic_layout[@]}" "$@"

say "done in $((SECONDS - started)) s ($((installed - started)) s of them set-up)"
[ -z "$task" ] || exit 0
echo "try it:              $python -m megappo generate $dir/ppo --raw --prompt 347+8= --max-tokens 6"
echo "                     (answers are written from the last digit on, as sums are worked out by hand: 355 is 553)"
