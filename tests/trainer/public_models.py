"""The public models that the recipes name, by the facts of `configs/models`, with their parameter totals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[2] / "configs/models"


def facts_of(name: str) -> dict[str, Any]:
    return json.loads((FACTS / name / "config.json").read_text())


QWEN_05B, QWEN_15B = facts_of("Qwen2.5-0.5B-Instruct"), facts_of("Qwen2.5-1.5B-Instruct")
DEEPSEEK_7B, LLAMA_1B = facts_of("deepseek-llm-7b-chat"), facts_of("Llama-3.2-1B-Instruct")
MINISTRAL_3B = facts_of("Ministral-3-3B-Instruct-2512")

VISION_30B_A3B = facts_of("Qwen3-VL-30B-A3B-Instruct")

# recipe -> (config.json, parameters, steps of a full run on the 7,473 training prompts of GSM8K). The totals of all but the last
# are those that the models' pages state; Ministral's counts its language model, by hand: embedding 131,072 x 3,072, 26 layers of
# 116,398,080 (query and output 3,072 x 4,096 each, key and value 3,072 x 1,024 each, MLP 3 x 3,072 x 9,216, two norms), norm.
PUBLIC: dict[str, tuple[dict[str, Any], int, int]] = {
    "gsm8k_qwen2.5_0.5b": (QWEN_05B, 494_032_768, 438),
    "gsm8k_qwen2.5_1.5b_megatron": (QWEN_15B, 1_543_714_304, 100),
    "gsm8k_qwen2.5_1.5b_fsdp2": (QWEN_15B, 1_543_714_304, 100),
    "gsm8k_deepseek_7b_chat": (DEEPSEEK_7B, 6_910_365_696, 110),
    "gsm8k_llama3.2_1b": (LLAMA_1B, 1_235_814_400, 351),
    "gsm8k_llama3.2_1b_multi": (LLAMA_1B, 1_235_814_400, 292),
    "gsm8k_ministral3_3b": (MINISTRAL_3B, 3_429_006_336, 351),
}

CONVERTED = {"gsm8k_deepseek_7b_verl"}
"""Recipes that `megappo convert` wrote: tests/commands/convert holds their text, test_recipes_fit.py of
tests/commands/plan their plan."""
