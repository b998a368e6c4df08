"""Every recipe at a size for two CPU ranks: a random checkpoint of its architecture, a tokenizer trained on GSM8K, overrides.

What the overrides change is size, precision and layout; everything else is what the recipe's file says.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.data.tokenizer_files import TEMPLATE, write_hf_tokenizer
from tests.gsm8k_files import DIRECTORY, gsm8k
from tests.models.checkpoints import COMPOSITE, write_checkpoint
from tests.models.fp8_checkpoints import quantise_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
VOCAB = 1201  # odd, so that tp 2 pads it
PROMPTS_PER_STEP, MINI_BATCH, MAX_PROMPT, MAX_RESPONSE = 8, 4, 160, 12

# In the manner of each family; {role: user, content: ...} is all that they are given, Mistral's a system message as well.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}User: {{ m['content'] }}\n\n{% else %}{{ m['content'] }}"
    "\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}[SYSTEM_PROMPT]You are a model.[/SYSTEM_PROMPT]{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'system' %}[SYSTEM_PROMPT]{{ m['content'] }}[/SYSTEM_PROMPT]{% else %}"
    "[INST]{{ m['content'] }}[/INST]{% endif %}{% endfor %}"
)

# Prompts are longer than the original length, so that YaRN and the scaling of the queries act.
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
}

# AdamW divides by the size of a gradient: where that is rounding alone, only a larger eps keeps two engines from walking apart.
_OF_TWINS = ("rollout.samples_per_prompt=1", "policy.optimizer.eps=1e-5", "critic.optimizer.eps=1e-5")


@dataclass(frozen=True)
class Family:
    """recipe: file in configs/. case, changes: see tests/models/checkpoints.py. layout: overrides for a world of two ranks.
    fp8: the checkpoint is quantised, as the release is."""

    recipe: str
    case: str
    changes: dict[str, Any]
    template: str
    layout: tuple[str, ...]
    fp8: bool = False


FAMILIES: dict[str, Family] = {
    "qwen2.5 0.5b: policy tp 2 sp, critic pp 2": Family(
        "gsm8k_qwen2.5_0.5b",
        "qwen2_tied",
        dict(hidden_size=128),
        TEMPLATE,
        ("policy.parallel.tp=2", "policy.parallel.sequence_parallel=true", "critic.parallel.pp=2", "reference.parallel.tp=2"),
    ),
    "qwen2.5 1.5b: policy dp 2, critic tp 2, rollout tp 2": Family(
        "gsm8k_qwen2.5_1.5b_megatron",
        "qwen2_tied",
        dict(hidden_size=128),
        TEMPLATE,
        ("critic.parallel.tp=2", "rollout.tp=2", *_OF_TWINS),
    ),
    "qwen2.5 1.5b: all roles fsdp2, rollout tp 2": Family(
        "gsm8k_qwen2.5_1.5b_fsdp2",
        "qwen2_tied",
        dict(hidden_size=128),
        TEMPLATE,
        ("rollout.tp=2", *_OF_TWINS),
    ),
    "deepseek: policy pp 2, critic tp 2 sp, rollout tp 2": Family(
        "gsm8k_deepseek_7b_chat",
        "llama",
        dict(head_dim=32, num_key_value_heads=4),
        DEEPSEEK,
        (
            "policy.parallel.tp=1",
            "policy.parallel.sequence_parallel=false",
            "policy.parallel.pp=2",
            "critic.parallel.tp=2",
            "rollout.tp=2",
        ),
    ),
    "llama 3.2, one gpu: policy pp 2, critic dp 2": Family(
        "gsm8k_llama3.2_1b",
        "llama3_tied",
        dict(head_dim=32),
        LLAMA3,
        ("policy.parallel.pp=2", "reference.parallel.pp=2"),
    ),
    "llama 3.2, several gpus: its own layouts": Family(
        "gsm8k_llama3.2_1b_multi",
        "llama3_tied",
        dict(head_dim=32),
        LLAMA3,
        (),
    ),
    "ministral 3 as shipped: policy tp 2 sp, critic dp 2": Family(
        "gsm8k_ministral3_3b",
        COMPOSITE,
        dict(head_dim=32, rope_parameters=_MINISTRAL_ROPE),
        MISTRAL,
        ("policy.parallel.tp=2", "policy.parallel.sequence_parallel=true", "reference.parallel.tp=2"),
        fp8=True,
    ),
    # Families without a recipe of their own, in the recipes of their nearest relatives.
    "qwen 3: policy dp 2, critic pp 2": Family(
        "gsm8k_qwen2.5_0.5b",
        "qwen3",
        dict(head_dim=32),
        TEMPLATE,
        ("critic.parallel.pp=2",),
    ),
    "mistral: policy tp 2, critic tp 2": Family(
        "gsm8k_llama3.2_1b",
        "mistral",
        dict(head_dim=32),
        MISTRAL,
        ("policy.parallel.tp=2", "critic.parallel.tp=2"),
    ),
}


def write_family(folder: Path, family: Family) -> Path:
    """Checkpoint and tokenizer of one family."""
    write_checkpoint(folder, family.case, vocab_size=VOCAB, **family.changes)
    if family.fp8:
        quantise_checkpoint(folder, None, torch.bfloat16)
    write_hf_tokenizer(folder, [], chat_template=family.template)
    (folder / "tokenizer.json").write_text(_tokenizer())
    return folder


@functools.cache
def _tokenizer() -> str:
    """Train the tokenizer of all families, once; return its file."""
    with tempfile.TemporaryDirectory() as folder:
        questions = [record["question"] for record in gsm8k("train")[:1000]]
        return (write_hf_tokenizer(Path(folder), questions, VOCAB - 9) / "tokenizer.json").read_text()


def overrides_of(family: Family, model: Path, output: Path) -> list[str]:
    """Overrides that turn the recipe into a run of seconds. The learning rates let two steps be seen in the weights."""
    sizes = [
        f"policy.model={model}",
        f"run.output_dir={output}",
        "run.device=cpu",
        "run.num_ranks=2",
        f"data.train={DIRECTORY / 'train.jsonl'}",
        f"data.eval={DIRECTORY / 'test.jsonl'}",
        "data.eval_prompts=4",
        f"data.prompts_per_step={PROMPTS_PER_STEP}",
        f"algorithm.mini_batch_size={MINI_BATCH}",
        f"data.max_prompt_tokens={MAX_PROMPT}",
        f"rollout.max_response_tokens={MAX_RESPONSE}",
        "rollout.max_num_seqs=8",
        "policy.dtype=fp32",
        "critic.dtype=fp32",
        "policy.optimizer.lr=1e-3",
        "critic.optimizer.lr=1e-2",
        "trainer.epochs=null",
        # Random models answer nothing right; values that are not zero give them advantages to learn from.
        "critic.value_head=normal",
        "telemetry.trajectories_every=1",
        f"telemetry.trajectories_per_step={PROMPTS_PER_STEP}",
    ]
    if family.recipe != "gsm8k_deepseek_7b_chat":
        sizes.append("reference.dtype=fp32")
    return [*sizes, *family.layout]
