"""Measure the distance of the sampler's log-probs from the trainer's, by policy.logits_dtype: `benchmarks/measure_agreement.py
MODEL`.

MODEL: directory of a Hugging Face checkpoint, on one GPU or the CPU. Draws responses with vLLM and computes their log-probs
with the trainer, over the same recorded ids and experts; of a model with experts also with the trainer's own.
docs/agreement.md explains the figures.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LOGITS = ("fp32", "bf16")


def main() -> None:
    arguments = read_arguments()
    from megappo.runtime.libraries import quiet_libraries

    quiet_libraries()  # before Megatron-core is imported
    try:
        rows = measure(arguments)
    except ValueError as error:
        sys.exit(f"measure_agreement: {error}")
    print(f"{'log-probs':17} {'mean':>9} {'99 %':>9} {'max':>9} {'equal':>7}")
    for dtype, d in rows.items():
        equal = (d < 1e-5).float().mean()
        print(f"{dtype:17} {d.mean():9.1e} {d.quantile(0.99):9.1e} {d.max():9.1e} {equal:7.0%}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory with config.json and safetensors")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of both models' weights")
    parser.add_argument("--trainer-dtype", choices=("bf16", "fp32"), help="of the trainer's, if it differs")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--responses", type=int, default=64, help="responses to random prompts of 4 to 19 tokens")
    parser.add_argument("--tokens", type=int, default=64, help="length of a response")
    parser.add_argument("--highest-id", type=int, help="of the tokens of prompts; otherwise the whole vocabulary")
    return parser.parse_args()


def policy_of(model: str, dtype: str, device: Any) -> Any:
    """Build the policy of a checkpoint on one rank, frozen."""
    from megappo.config.role_sections import RoleConfig
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout

    spec = EngineSpec("policy", model, read_arch(model), RoleConfig(dtype=dtype))
    return build_megatron(spec, build_groups(ParallelLayout(world_size=1)), device=device)


def engine_of(model: str, dtype: str, device: Any, max_model_len: int, config: Any) -> Any:
    """Start vLLM for a checkpoint, without its weights. config: the section rollout."""
    from megappo.models.hf_config import read_arch
    from megappo.parallel.device import DTYPES
    from megappo.rollout.vllm_engine import VllmEngine
    from megappo.rollout.vllm_options import VllmModel

    described = VllmModel(model, read_arch(model), DTYPES[dtype], max_model_len)
    return VllmEngine(described, config, device=device, eos_token_ids=())


def distances(
    engine: Any, policy: Any, tokens: int, count: int, logits: Sequence[str] = LOGITS, highest: int | None = None, **sampling: Any
) -> dict[str, Any]:
    """Draw `count` responses to prompts of 4 to 19 random tokens: the trainer's `logits_dtype` -> [sampled tokens] |log-prob of
    vLLM - log-prob of the trainer|, and the same with the trainer's own experts. highest: id of the prompts' tokens. sampling:
    temperature, top_p, top_k."""
    from megappo.rollout.generation import generate
    from megappo.rollout.types import SamplingParams
    from megappo.trainer.experience.collect import make_requests, pack_experience
    from megappo.trainer.roles import LanguageModel

    rng = random.Random(0)
    highest = highest or engine._model.arch.vocab_size - 1
    prompts = [[rng.randrange(3, highest) for _ in range(rng.randint(4, 19))] for _ in range(count)]
    requests = list(make_requests(prompts, samples_per_prompt=1, run_seed=0, step=1))
    drawn = SamplingParams(tokens, record_top_k_ids=True, **sampling)
    generate(engine, requests[:1], drawn)
    start = time.perf_counter()
    responses = generate(engine, requests, drawn)
    seconds = time.perf_counter() - start
    moe = engine._model.arch.moe
    recorded = {"with_top_k_ids": drawn.top_k_width > 0, "num_experts": 0 if moe is None else moe.num_experts}
    batch = pack_experience(requests, responses, **recorded)
    mask = batch["response_mask"]
    print(f"{int(mask.sum())} tokens, {seconds / int(mask.sum()) * 1e6:.0f} us each")
    found = {}
    for dtype in logits:
        logprob, _ = LanguageModel(policy, drawn.temperature, dtype).logprobs(batch, want_entropy=False)
        found[dtype] = (logprob - batch["rollout_logprob"])[mask].abs()
        if moe is not None:
            logprob, _ = LanguageModel(policy, drawn.temperature, dtype, replays_experts=False).logprobs(batch, want_entropy=False)
            found[f"{dtype}, own experts"] = (logprob - batch["rollout_logprob"])[mask].abs()
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """logits_dtype -> [sampled tokens] |log-prob of vLLM - log-prob of the trainer|."""
    import torch.distributed as dist

    from megappo.config.schema import RolloutConfig
    from megappo.parallel.device import select_device, start_alone

    device = select_device("auto")
    start_alone(device)
    policy = policy_of(arguments.model, arguments.trainer_dtype or arguments.dtype, device)
    engine = engine_of(arguments.model, arguments.dtype, device, 20 + arguments.tokens, RolloutConfig())
    engine.connect(policy)
    engine.push_weights(1)
    sampling = {"temperature": arguments.temperature, "top_p": arguments.top_p, "top_k": arguments.top_k}
    found = distances(engine, policy, arguments.tokens, arguments.responses, LOGITS, arguments.highest_id, **sampling)
    engine.close()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
