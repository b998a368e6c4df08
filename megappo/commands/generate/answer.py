"""Generation from a Hugging Face checkpoint, through the same model, bridge and engine as a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from megappo.commands.generate.inputs import dtype_of_weights
from megappo.config.role_sections import ModelConfig, PolicyConfig, RoleConfig
from megappo.config.run_sections import RunConfig, TimeoutsConfig
from megappo.config.schema import RolloutConfig, TrainConfig
from megappo.config.vllm_args import temperature_problem
from megappo.data.prompts import PromptFormat, encode_question
from megappo.data.token_texts import response_text
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from megappo.engine.build import RoleEngines
from megappo.engine.factory import EngineBackend, EngineSpec
from megappo.models.hf_config import read_arch
from megappo.parallel.device import select_device, start_alone
from megappo.rollout.build import build_rollout
from megappo.rollout.generation import generate
from megappo.rollout.types import SamplingParams
from megappo.runtime.ending import input_accepted
from megappo.trainer.experience.collect import make_requests

DEFAULT_TOKENS = 256


@dataclass(frozen=True)
class Texts:
    """Encoding of prompts. tokenizer: its path, None for that of the model. template_args: of its chat template."""

    chat_template: bool
    tokenizer: str | None = None
    template_args: Mapping[str, Any] | None = None

    def load(self, model: str) -> Tokenizer:
        """Load the tokenizer. Raises ValueError if there is none, or no chat template."""
        path = self.tokenizer or model
        try:
            tokenizer = load_tokenizer(path, model, self.template_args)
        except ValueError as error:
            raise ValueError(str(error).replace("data.template_args", "--template-args")) from error
        if self.chat_template and not tokenizer.has_chat_template:
            raise ValueError(f"the tokenizer {path} has no chat template; prompts go as they are with --raw")
        return tokenizer


def answer(
    model: str,
    prompts: Sequence[str],
    texts: Texts,
    *,
    engine: Literal["vllm", "megatron"],
    max_tokens: int | None,
    temperature: float,
    dtype: Literal["bf16", "fp32"] | None,
    engines: EngineBackend = RoleEngines,
) -> list[str]:
    """Generate one response text per prompt, in one process. `engine` samples; `engines` build the model that it samples from.
    max_tokens: None for DEFAULT_TOKENS, or fewer if the model takes no more. dtype: None for that of the checkpoint.
    Raises ValueError for a missing checkpoint, tokenizer or engine, no prompts, or a temperature below 0."""
    if not prompts:
        raise ValueError("generate: no prompts; give --prompt TEXT or lines on standard input")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"--temperature {temperature}: must be 0 (greedy) or a positive number")
    if engine == "vllm" and (message := temperature_problem("--temperature", temperature)) is not None:
        raise ValueError(message)
    arch, dtype = read_arch(model), dtype or dtype_of_weights(model)
    tokenizer, prompt_format = texts.load(model), PromptFormat(texts.chat_template, None, "")
    tokens = [encode_question(prompt, tokenizer, prompt_format, f"prompt {i + 1}") for i, prompt in enumerate(prompts)]
    longest = max(len(prompt) for prompt in tokens)
    max_tokens = max_tokens or max(1, min(DEFAULT_TOKENS, arch.max_positions - longest))
    if longest + max_tokens > arch.max_positions:
        raise ValueError(
            f"--max-tokens {max_tokens}: {model} takes {arch.max_positions} tokens in all and the longest prompt has {longest}; "
            + (f"use at most {arch.max_positions - longest}" if longest < arch.max_positions else "shorten it")
        )
    device = select_device("auto")
    start_alone(device)
    policy = engines(ModelConfig(impl="local"), TimeoutsConfig(), device).build(
        EngineSpec("policy", model, arch, RoleConfig(dtype=dtype))
    )
    assert policy is not None, "alone in its world"
    # Not validated: a path that a configuration would refuse may stand on a command line.
    config = TrainConfig.model_construct(
        rollout=RolloutConfig(engine=engine, max_response_tokens=max_tokens),
        policy=PolicyConfig.model_construct(model=model, dtype=dtype),
        run=RunConfig(),
    )
    rollout = build_rollout(config, policy, tokenizer=tokenizer, max_sequence_tokens=longest + max_tokens, device=device)
    with input_accepted():
        rollout.push_weights(version=0)
        sampling = SamplingParams(max_tokens, temperature, stop_token_ids=tokenizer.eos_ids)
        # One process is one replica, so it has all responses.
        responses = generate(rollout, make_requests(tokens, samples_per_prompt=1, run_seed=0, step=0), sampling)
        rollout.close()
        dist.destroy_process_group()
        return [response_text(response.tokens.tolist(), tokenizer) for response in responses]
