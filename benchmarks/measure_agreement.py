"""Measure the distance of the sampler's log-probs from the trainer's, by policy.logits_dtype: `benchmarks/measure_agreement.py
MODEL`.

MODEL: directory of a Hugging Face checkpoint, on one GPU or the CPU. Draws responses with vLLM and computes their log-probs
with the trainer, over the same recorded ids. docs/agreement.md explains the figures.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
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
    print(f"{'log-probs':10} {'mean':>9} {'99 %':>9} {'max':>9} {'equal':>7}")
    for dtype, d in rows.items():
        equal = (d < 1e-5).float().mean()
        print(f"{dtype:10} {d.mean():9.1e} {d.quantile(0.99):9.1e} {d.max():9.1e} {equal:7.0%}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="directory with config.json and safetensors")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of both models' weights")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--responses", type=int, default=64, help="responses to random prompts of 4 to 19 tokens")
    parser.add_argument("--tokens", type=int, default=64, help="length of a response")
    parser.add_argument("--highest-id", type=int, help="of the tokens of prompts; otherwise the whole vocabulary")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """logits_dtype -> [sampled tokens] |log-prob of vLLM - log-prob of the trainer|."""
    import torch.distributed as dist

    from megappo.config.role_sections import RoleConfig
    from megappo.config.schema import RolloutConfig
    from megappo.engine.build import build_megatron
    from megappo.engine.factory import EngineSpec
    from megappo.models.hf_config import read_arch
    from megappo.parallel.device import DTYPES, select_device, start_alone
    from megappo.parallel.groups import build_groups
    from megappo.parallel.layout import ParallelLayout
    from megappo.rollout.generation import generate
    from megappo.rollout.types import SamplingParams
    from megappo.rollout.vllm_engine import VllmEngine
    from megappo.rollout.vllm_options import VllmModel
    from megappo.trainer.experience.collect import make_requests, pack_experience
    from megappo.trainer.roles import LanguageModel

    device = select_device("auto")
    start_alone(device)
    arch, groups = read_arch(arguments.model), build_groups(ParallelLayout(world_size=1))
    policy = build_megatron(EngineSpec("policy", arguments.model, arch, RoleConfig(dtype=arguments.dtype)), groups, device=device)
    engine = VllmEngine(
        VllmModel(arguments.model, arch, DTYPES[arguments.dtype], max_model_len=20 + arguments.tokens),
        RolloutConfig(),
        device=device,
        eos_token_ids=(),
    )
    engine.connect(policy)
    engine.push_weights(1)
    rng = random.Random(0)
    highest = arguments.highest_id or arch.vocab_size - 1
    prompts = [[rng.randrange(3, highest) for _ in range(rng.randint(4, 19))] for _ in range(arguments.responses)]
    requests = list(make_requests(prompts, samples_per_prompt=1, run_seed=0, step=1))
    sampling = SamplingParams(arguments.tokens, arguments.temperature, arguments.top_p, arguments.top_k, record_top_k_ids=True)
    generate(engine, requests[:1], sampling)
    start = time.perf_counter()
    responses = generate(engine, requests, sampling)
    seconds = time.perf_counter() - start
    batch = pack_experience(requests, responses, with_top_k_ids=sampling.top_k_width > 0)
    mask = batch["response_mask"]
    print(f"{int(mask.sum())} tokens, {seconds / int(mask.sum()) * 1e6:.0f} us each")
    found = {}
    for dtype in LOGITS:
        logprob, _ = LanguageModel(policy, arguments.temperature, dtype).logprobs(batch, want_entropy=False)
        found[dtype] = (logprob - batch["rollout_logprob"])[mask].abs()
    engine.close()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
