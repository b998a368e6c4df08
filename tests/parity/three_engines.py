"""transformers, Megatron and vLLM on the same checkpoint: what a world of two ranks measures for `test_three_engines.py`.

transformers (eager attention) reads the checkpoint by itself and is the oracle. Megatron imports it in several layouts; vLLM gets
the weights over the bridge from the last of them. Every engine scores the same sequences and continues the same prompts greedily.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from megappo.config.role_sections import RoleConfig
from megappo.data.packing import pack
from megappo.engine import build
from megappo.engine.factory import EngineSpec
from megappo.models.hf_config import read_arch
from megappo.parallel import cpu_patches
from megappo.parallel.consensus import told_by
from megappo.parallel.groups import ProcessGroups, build_groups
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.megatron_engine import MegatronRollout
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from megappo.trainer.roles import LanguageModel
from tests.engine.whole import Whole
from tests.rollout.engines import make_engine
from tests.rollout.responses import generate_all

RANKS = 2
VOCABULARY = 131
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tokens = list[tuple[int, ...]]


class Case(NamedTuple):
    """checkpoint: of `tests.models.checkpoints`. config: changes of it. layouts: of Megatron, sizes of ParallelLayout. of_vllm: its
    tp.

    seed: of the weights; one with which the best logit of every greedy token leads clearly.
    """

    checkpoint: str
    config: Mapping[str, Any]
    layouts: Sequence[Mapping[str, Any]]
    seed: int = 0
    of_vllm: Sequence[int] = (2,)


def sequences() -> list[list[int]]:
    """Up to 100 tokens: past every window and past the original length of the rescaled rotary embeddings of the cases."""
    rng = random.Random(11)
    return [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (2, 7, 20, 33, 40, 64, 90, 100)]


def requests() -> list[Request]:
    return [Request(index, tuple(tokens), seed=index) for index, tokens in enumerate(sequences())]


# -------------------------------------------------------------------------------------------------------------- transformers


def load_transformers(path: str, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def score_by_transformers(model: Any) -> list[Tensor]:
    """Every sequence by itself, so that no padding is involved."""
    scored = []
    for tokens in sequences():
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
        scored.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
    return scored


def continue_by_transformers(model: Any) -> tuple[Tokens, float]:
    """(greedy responses, smallest distance of the best logit to the second at any of their tokens)."""
    responses, gap = [], float("inf")
    for tokens in sequences():
        with torch.no_grad():
            out = model.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                do_sample=False,
                max_new_tokens=GREEDY.max_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
        responses.append(tuple(out.sequences[0, len(tokens) :].tolist()))
        best = torch.cat(out.logits).topk(2).values
        gap = min(gap, float((best[:, 0] - best[:, 1]).min()))
    return responses, gap


# ------------------------------------------------------------------------------------------------------------ Megatron, vLLM


def build_megatron(path: str, groups: ProcessGroups, dtype: str) -> Any:
    spec = EngineSpec("policy", path, read_arch(path), RoleConfig(dtype=dtype, micro_batch_tokens=256))
    return build.build_megatron(spec, groups, device=torch.device("cpu"))


def score_by_megatron(engine: Any) -> list[Tensor]:
    batch = pack(sequences())
    logprob, _ = LanguageModel(Whole(engine), 1.0).logprobs(batch, want_entropy=False)
    starts = batch.cu_seqlens.tolist()
    return [logprob[start + 1 : end] for start, end in zip(starts, starts[1:])]


def continue_by_megatron(engine: Any) -> Tokens:
    return tokens_of(generate_all(MegatronRollout(engine), requests(), GREEDY))


@contextlib.contextmanager
def vllm_with_weights(path: str, policy: Any, tp: int, dtype: str) -> Iterator[VllmEngine]:
    with contextlib.closing(make_engine(path, tp, dtype=DTYPES[dtype], max_model_len=128)) as engine:
        engine.connect(policy)
        engine.push_weights(1)
        yield engine


def score_by_vllm(engine: VllmEngine) -> list[Tensor]:
    """vLLM's log-probs of the prompts; every replica scores all of them."""
    from vllm import SamplingParams as VllmSampling

    params = VllmSampling(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with engine._running():
        outputs = engine._llm.generate([{"prompt_token_ids": tokens} for tokens in sequences()], params, use_tqdm=False)
    scored = []
    for tokens, output in zip(sequences(), outputs, strict=True):
        positions = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        scored.append(torch.tensor([logprobs[token].logprob for token, logprobs in positions]))
    return scored


def continue_by_vllm(engine: VllmEngine) -> Tokens:
    return tokens_of(generate_all(engine, requests(), GREEDY))


def tokens_of(responses: Sequence[Response]) -> Tokens:
    return [tuple(response.tokens.tolist()) for response in responses]


# ------------------------------------------------------------------------------------------------------------- in the world


def errors_of(logprobs: list[Tensor], want: list[Tensor]) -> dict[str, float]:
    """max and mean of |difference| over all scored tokens."""
    errors = torch.cat([(a - b).abs() for a, b in zip(logprobs, want, strict=True)])
    return {"max": float(errors.max()), "mean": float(errors.mean())}


class Worlds:
    """The process groups of the layouts, built once each."""

    def __init__(self) -> None:
        self._groups: dict[ParallelLayout, ProcessGroups] = {}

    def groups(self, sizes: Mapping[str, Any]) -> ProcessGroups:
        layout = ParallelLayout(RANKS, **sizes)
        if layout not in self._groups:
            self._groups[layout] = build_groups(layout)
        return self._groups[layout]


def of_rank_0(work: Callable[[], Any]) -> Any:
    """What rank 0 computes, on every rank: transformers knows of no others. Collective."""
    return told_by(0, work() if dist.get_rank() == 0 else None)


@functools.cache
def exact_of(path: str) -> tuple[list[Tensor], Tokens, float]:
    """Log-probs of transformers in fp32, and as `continue_by_transformers`. Collective."""

    def work() -> tuple[list[Tensor], Tokens, float]:
        model = load_transformers(path, torch.float32)
        return score_by_transformers(model), *continue_by_transformers(model)

    return of_rank_0(work)


def rounded_of(path: str) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs of transformers in bf16, and in fp32 with the same rounded weights. Collective."""

    def work() -> tuple[list[Tensor], list[Tensor]]:
        model = load_transformers(path, torch.bfloat16)
        return score_by_transformers(model), score_by_transformers(model.float())

    return of_rank_0(work)


def run_fp32(path: str, case: Case, worlds: Worlds) -> dict[str, Any]:
    """Differences of Megatron and of vLLM in every layout of the case to transformers."""
    logprobs, tokens, gap = exact_of(path)
    result: dict[str, Any] = {"gap": gap, "megatron": {}, "vllm": {}}
    for sizes in case.layouts:
        policy = build_megatron(path, worlds.groups(sizes), "fp32")
        result["megatron"][str(policy.groups.layout)] = errors_of(score_by_megatron(policy), logprobs)
    result["same_tokens"] = continue_by_megatron(policy) == tokens  # in the last layout, as its log-probs are those of the others
    for tp in case.of_vllm:
        with vllm_with_weights(path, policy, tp, "fp32") as engine:
            found = errors_of(score_by_vllm(engine), logprobs) | {"same_tokens": continue_by_vllm(engine) == tokens}
        result["vllm"][tp] = found
    return result


def run_bf16(path: str, case: Case, worlds: Worlds, in_vllm: bool) -> dict[str, Any]:
    """Errors against transformers in fp32 with the same rounded weights: of transformers in bf16, of Megatron, and of vLLM if
    `in_vllm`. Megatron on one rank and in the last layout: what others do to bf16 is in the parity matrix.
    """
    own, exact = rounded_of(path)
    result = {"transformers": errors_of(own, exact), "megatron": {}}
    for sizes in (case.layouts[0], case.layouts[-1]):
        policy = build_megatron(path, worlds.groups(sizes), "bf16")
        result["megatron"][str(policy.groups.layout)] = errors_of(score_by_megatron(policy), exact)
    if in_vllm:
        with vllm_with_weights(path, policy, 1, "bf16") as engine:
            result["vllm"] = {1: errors_of(score_by_vllm(engine), exact)}
    return result


def run_wrong(right: str, wrong: str, worlds: Worlds, in_vllm: bool) -> dict[str, dict[str, float]]:
    """The same weights under another config, in Megatron and, if `in_vllm`, in vLLM, against transformers with the right one."""
    logprobs, *_ = exact_of(right)
    policy = build_megatron(wrong, worlds.groups({}), "fp32")
    result = {"megatron": errors_of(score_by_megatron(policy), logprobs)}
    if in_vllm:
        with vllm_with_weights(wrong, policy, 1, "fp32") as engine:
            result["vllm"] = errors_of(score_by_vllm(engine), logprobs)
    return result


def in_world(
    rank: int, folder: str, cases: Mapping[str, Case], rounded: Sequence[str], wrong: Sequence[tuple[str, str, bool]]
) -> dict[str, Any]:
    """rounded: cases that vLLM runs in bf16 too. wrong: a case, the directory, beside the case's, of the same checkpoint with
    another config, and whether vLLM runs it.
    """
    cpu_patches.install()
    worlds = Worlds()
    root = Path(folder)
    return {
        "fp32": {name: run_fp32(str(root / name), case, worlds) for name, case in cases.items()},
        "bf16": {name: run_bf16(str(root / name), case, worlds, name in rounded) for name, case in cases.items()},
        "wrong": {other: run_wrong(str(root / name), str(root / other), worlds, too) for name, other, too in wrong},
    }
