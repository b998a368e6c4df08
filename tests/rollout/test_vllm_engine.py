"""vLLM beside the trainer in the same ranks: weights through the bridge, tokens and log-probs against transformers.

One world of two ranks runs every case (importing vLLM takes as long as all of them); the tests look at what it returned.
transformers is the oracle throughout: it reads the checkpoints the policy's shards were cut from and scores vLLM's tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers

from megappo.bridge.vllm_reload import reload_api
from megappo.commands.plan.memory import rollout_memory
from megappo.config.run_sections import TimeoutsConfig
from megappo.models.hf_config import read_arch
from megappo.models.weight_map import hf_tensors
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.types import Request, Response, SamplingParams
from megappo.rollout.vllm_engine import VllmEngine
from tests.bridge.engines import HeldPolicy, layout_mistakes, policy_tensors
from tests.data.tokenizer_files import write_hf_tokenizer
from tests.models.checkpoints import write_checkpoint
from tests.ops.linear_calls import linear_logprob
from tests.rollout.engines import make_engine
from tests.rollout.responses import generate_all, going_on, plain, sequence
from tests.worlds import spawn_world

RANKS = 2
TOLERANCE = 1e-4  # fp32; BRIDGE measured at most 3e-5 on peaky logits, a wrong slice gives 1e-1 and more
TIMEOUTS = TimeoutsConfig(start_s=301.5, pass_s=100, meeting_s=402)
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)

# Positions of the long requests are past the original length, where YaRN and the scaling of the queries act.
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
# name -> (checkpoint case, changes of its config, engine tp, train layouts (tp, pp))
CASES: dict[str, tuple[str, dict, int, tuple[tuple[int, int], ...]]] = {
    "llama to tp1 x 2": ("llama", dict(head_dim=32), 1, ((2, 1), (1, 2), (1, 1))),
    "llama to tp2": ("llama", dict(head_dim=32), 2, ((2, 1), (1, 2))),
    # vLLM pads 32 tokens to 64, so that rank 1 holds padding only
    "one kv head and a small vocabulary to tp2": ("llama", dict(head_dim=32, num_key_value_heads=1, vocab_size=32), 2, ((1, 2),)),
    "qwen2 tied with biases to tp2": ("qwen2_tied", dict(hidden_size=128), 2, ((1, 2),)),
    "qwen3 to tp2": ("qwen3", dict(head_dim=32), 2, ((2, 1),)),
    "multimodal ministral3 to tp1 x 2": ("ministral3_tied", dict(head_dim=32, rope_parameters=_MINISTRAL_ROPE), 1, ((1, 2),)),
}


# ------------------------------------------------------------------------------------------------------------- in the world


def load(path: str) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def requests_of(seed: int, count: int = 6, vocab: int = 131) -> list[Request]:
    rng = random.Random(seed)
    return [Request(i, tuple(rng.randrange(3, vocab) for _ in range(rng.randint(3, 30))), seed=i) for i in range(count)]


def long_requests(vocab: int = 131) -> list[Request]:
    """Longer than vLLM's 128-token cache blocks, so that stale cached keys and values would be used."""
    rng = random.Random(9)
    return [Request(i, tuple(rng.randrange(3, vocab) for _ in range(170)), seed=i) for i in range(2)]


def logits_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocabulary]. A model's answers of the same ids, as those of other layouts mostly are, are computed once."""
    known = vars(model).setdefault("known_logits", {})
    if tuple(ids) not in known:
        with torch.no_grad():
            known[tuple(ids)] = model(input_ids=torch.tensor([ids])).logits[0]
    return known[tuple(ids)]


def distance(model: torch.nn.Module, requests: list[Request], responses: list[Response], temperature: float = 1.0) -> float:
    """Largest |log-prob difference| to transformers on the same tokens; 1e9 where a greedy token is not transformers' best."""
    worst = 0.0
    for request, response in zip(requests, responses, strict=True):
        logits = logits_of(model, sequence(request, response))
        logprobs = torch.log_softmax(logits.float() / temperature, -1)[len(request.prompt) - 1 : -1]
        chosen = logprobs.gather(1, torch.from_numpy(response.tokens).long()[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.from_numpy(response.logprobs)).abs().max()))
    return worst


def is_greedy(model: torch.nn.Module, requests: list[Request], responses: list[Response]) -> bool:
    for request, response in zip(requests, responses, strict=True):
        best = logits_of(model, sequence(request, response))[len(request.prompt) - 1 : -1].argmax(-1)
        if best.tolist() != response.tokens.tolist():
            return False
    return True


def memory_of(engine: VllmEngine, destination: Any) -> dict[str, int]:
    """Parameters, and of the KV cache the bytes and the tokens that fit into it, of this rank."""
    runner = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    caches = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    cache_config = runner.vllm_config.cache_config
    return {
        "parameters": sum(shape.slots * shape.rows * shape.cols for shape in destination.shapes.values()),
        "cache_bytes": sum(caches.values()),
        "cache_tokens": cache_config.num_gpu_blocks * cache_config.block_size,
    }


def limits_of_vllms_groups() -> dict[str, float]:
    """Seconds that the exchanges of a replica may take: on the ranks' device, which is the CPU too, and on the host."""
    from vllm.distributed.parallel_state import get_tp_group

    groups = {"device": get_tp_group().device_group, "host": get_tp_group().cpu_group}
    return {name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for name, group in groups.items()}


def chat_warmup(engine: VllmEngine, *, filtered: bool = True) -> list[str]:
    """Log of vLLM when it tries the template of chats, as at every start, at the level that a GPU has."""
    from vllm.renderers.params import ChatParams

    logger, said = logging.getLogger("vllm.renderers.base"), logging.Handler()
    messages: list[str] = []
    said.emit = lambda record: messages.append(record.getMessage())
    with engine._running():
        logger.addHandler(said)
        logger.setLevel(logging.WARNING)
        filters, logger.filters = logger.filters, logger.filters if filtered else []
        engine._llm.renderer.warmup(ChatParams())
        logger.filters = filters
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(said)
    return messages


class Policy(HeldPolicy):
    """Megatron shards of one rank, refilled from a transformers model."""

    def __init__(self, path: str, tp: int, pp: int, rename: Callable[[str], str] | None = None) -> None:
        super().__init__(read_arch(path), ParallelLayout(RANKS, tp=tp, pp=pp), rename=rename)

    def become(self, model: torch.nn.Module) -> None:
        self.tensors = policy_tensors(self.arch, self.layout, dist.get_rank(), model.state_dict())


def run_case(rank: int, folder: str, name: str) -> dict[str, Any]:
    _, _, engine_tp, layouts = CASES[name]
    old, new = (load(f"{folder}/{name}/{which}") for which in ("old", "new"))
    path = f"{folder}/{name}/{'multimodal' if name.startswith('multimodal') else 'old'}"
    vocab = read_arch(path).vocab_size
    requests = requests_of(1, vocab=vocab) + long_requests(vocab)
    before = process_state()
    with contextlib.closing(make_engine(path, engine_tp, timeouts=TIMEOUTS)) as engine:
        built = process_state()
        results: dict[str, Any] = {"push": {}, "built": [name for name in built if built[name] != before[name]]}
        for tp, pp in layouts:
            policy = Policy(path, tp, pp)
            engine.connect(policy)
            results.setdefault("unpushed", error_of(lambda: generate_all(engine, requests, GREEDY)))
            steps = []
            for version, model in ((1, old), (2, new)):
                policy.become(model)
                metrics = engine.push_weights(version)
                responses = generate_all(engine, requests, GREEDY)
                other = new if model is old else old
                steps.append(
                    {
                        "distance": distance(model, requests, responses),
                        "greedy": is_greedy(model, requests, responses),
                        "to_other": distance(other, requests, responses),
                        "version": {version for r in responses for version in (r.oldest_version, r.newest_version)},
                        "lengths": [len(r.tokens) for r in responses],
                        "metrics": metrics,
                    }
                )
            results["push"][tp, pp] = steps
        destination = engine.receiver.describe(hf_tensors(policy.arch))
        results["memory"] = memory_of(engine, destination)
        results["limits"] = limits_of_vllms_groups()
        results["layout"] = layout_mistakes(destination, policy.arch, new.state_dict(), engine_tp, rank % engine_tp)
        results["shared_memory"] = [name for name in os.listdir("/dev/shm") if name.startswith(engine._identity)]
        if name == "llama to tp2":
            results["warmed up"] = [chat_warmup(engine), chat_warmup(engine, filtered=False)]
        if name == "llama to tp1 x 2":
            results["sampling"] = run_sampling(engine, new)
            results["faults"] = run_faults(engine, path, old, new, rank)
    return results


def run_sampling(engine: VllmEngine, model: torch.nn.Module) -> dict[str, Any]:
    requests = requests_of(2, count=7)
    warm = SamplingParams(max_tokens=24, temperature=0.8)
    responses = generate_all(engine, requests, warm)
    drawn = plain(responses)
    again = plain(generate_all(engine, requests[::-1], warm)[::-1])
    alone = plain(generate_all(engine, requests[2:3], warm))
    reseeded = plain(generate_all(engine, [dataclasses.replace(r, seed=r.seed + 100) for r in requests], warm))
    narrow = generate_all(engine, requests, SamplingParams(max_tokens=24, temperature=0.8, top_k=5))
    nucleus = generate_all(engine, requests, SamplingParams(max_tokens=24, temperature=1.0, top_p=0.6))
    ending = drawn[0]["tokens"][5]
    stopped = plain(generate_all(engine, requests, dataclasses.replace(warm, stop_token_ids=(ending,))))
    engine._eos_token_ids = (ending,)
    ended = plain(generate_all(engine, requests, warm))
    engine._eos_token_ids = ()
    engine._detokenize = lambda tokens: "".join(f"<{token}>" for token in tokens)
    word = f"{drawn[1]['tokens'][7] % 10}><{drawn[1]['tokens'][8]}>"
    worded = plain(generate_all(engine, requests, dataclasses.replace(warm, stop=(word,))))
    engine._detokenize = None
    greedy = generate_all(engine, requests, GREEDY)
    errors = {}
    for key, bad, how in (
        ("long", [Request(0, (5,) * 250, 0)], warm),
        ("empty", [*requests, Request(7, (), 0)], warm),
        ("stop", requests, dataclasses.replace(warm, stop=("x",))),
    ):
        try:
            engine.submit(bad, how)
        except ValueError as error:
            errors[key] = str(error)
    return {
        "drawn": drawn,
        "again": again,
        "alone": alone,
        "reseeded": reseeded,
        "stopped": (ending, stopped),
        "ended": ended,
        "worded": (word, worded),
        "errors": errors,
        "distance": distance(model, requests, responses, 0.8),
        "narrow_distance": truncated_distance(model, requests, narrow, 0.8, top_k=5),
        "nucleus_distance": truncated_distance(model, requests, nucleus, 1.0, top_p=0.6),
        "none": generate_all(engine, [], warm),
        "greedy": plain(greedy),
        "going on": plain(generate_all(engine, [going_on(*pair) for pair in zip(requests, greedy)], GREEDY)),
        "unfinished": engine.num_unfinished,
    }


def truncated_distance(
    model: torch.nn.Module,
    requests: list[Request],
    responses: list[Response],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
) -> float:
    """Largest |log-prob difference| to the renormalised top-k or nucleus distribution, written with a sort in float64."""
    worst = 0.0
    for request, response in zip(requests, responses, strict=True):
        logits = logits_of(model, sequence(request, response)).double() / temperature
        for position, (token, logprob) in enumerate(
            zip(response.tokens.tolist(), response.logprobs.tolist()), start=len(request.prompt) - 1
        ):
            probs, order = torch.softmax(logits[position], -1).sort(descending=True)
            kept = top_k or int(((probs.cumsum(0) - probs) < top_p).sum())
            where = order[:kept].tolist().index(token) if token in order[:kept].tolist() else None
            if where is None:
                return 1e9
            worst = max(worst, abs(float(torch.log(probs[where] / probs[:kept].sum())) - logprob))
    return worst


def run_faults(engine: VllmEngine, path: str, old: torch.nn.Module, new: torch.nn.Module, rank: int) -> dict[str, Any]:
    """Break one thing at a time; each must show."""
    result: dict[str, Any] = {}
    requests = requests_of(3) + long_requests()

    def restart(tp: int, pp: int, rename: Callable[[str], str] | None = None) -> Policy:
        fresh = Policy(path, tp, pp, rename)
        fresh.become(new)
        engine.connect(fresh)
        return fresh

    # A flipped bit on its way into rank 1's engine.
    fresh = restart(2, 1)
    receiver = engine.receiver
    engine.receiver = Flipping(receiver) if rank == 1 else receiver
    result["flip"] = error_of(lambda: engine.push_weights(3))
    engine.receiver = receiver
    result["refuses"] = error_of(lambda: generate_all(engine, requests, GREEDY))
    engine.push_weights(4)
    result["recovered"] = distance(new, requests, generate_all(engine, requests, GREEDY))

    # Stale keys and values: the reset left out, and without it the version that is part of a cached prefix's key.
    fresh.become(old)
    with left_out_reset(engine):
        engine.push_weights(5)
        result["no_reset"] = distance(old, requests, generate_all(engine, requests, GREEDY))
        fresh.become(new)
        engine.push_weights(6)
        with one_salt("5"):
            result["no_salt"] = distance(new, requests, generate_all(engine, requests, GREEDY))
    engine.push_weights(6)
    with one_salt("5"):
        result["no_salt_but_reset"] = distance(new, requests, generate_all(engine, requests, GREEDY))

    # Gate and up exchanged in the map of the policy: consistent, so checksums pass, but the model is another one.
    restart(2, 1, exchanged)
    result["swap_verified"] = engine.push_weights(7)["verified"]
    result["swap"] = distance(new, requests, generate_all(engine, requests, GREEDY))

    # A rectangle that never comes (on both ranks, so that neither waits for the other).
    restart(1, 1)
    assert engine._sync is not None
    first = engine._sync._rounds[0]
    engine._sync._rounds[0] = first._replace(local=first.local[1:])
    result["dropped"] = error_of(lambda: engine.push_weights(8))
    return result


def exchanged(name: str) -> str:
    return name.replace("gate_proj", "x").replace("up_proj", "gate_proj").replace("x", "up_proj") if "mlp" in name else name


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def left_out_reset(engine: VllmEngine) -> Iterator[None]:
    real = engine._llm.reset_prefix_cache
    engine._llm.reset_prefix_cache = lambda: True
    yield
    engine._llm.reset_prefix_cache = real


@contextlib.contextmanager
def one_salt(salt: str) -> Iterator[None]:
    """Cached prefixes have the same key in all versions."""
    real, VllmEngine._cache_salt = VllmEngine._cache_salt, lambda self: salt
    yield
    VllmEngine._cache_salt = real


class Flipping:
    """A receiver that flips the lowest bit of one element of every o_proj."""

    def __init__(self, real: Any) -> None:
        self._real = real

    @contextlib.contextmanager
    def session(self, moves: Any, inspect: Any) -> Iterator[Any]:
        with self._real.session(moves, inspect) as land:

            def flipping(move: Any, values: torch.Tensor) -> None:
                if "o_proj" in move.hf:
                    values = values.clone()
                    values.view(torch.int32)[-1, -1] ^= 1
                land(move, values)

            yield flipping


def run_tokenized(folder: str) -> dict[str, Any]:
    """A bf16 engine under an fp32 policy, with a tokenizer so that vLLM itself looks for stop strings."""
    path = f"{folder}/tokenized"
    model = load(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    requests = requests_of(4)
    sampling = SamplingParams(max_tokens=24)
    with contextlib.closing(make_engine(path, 1, dtype=torch.bfloat16, tokenizer=path)) as engine:
        policy = Policy(path, 2, 1)
        policy.become(model)
        engine.connect(policy)
        metrics = engine.push_weights(1)
        rounding = logit_rounding(engine, model)
        drawn = generate_all(engine, requests, sampling)
        texts = [[tokenizer.decode(response.tokens[:n].tolist()) for n in range(1, 25)] for response in drawn]
        # the letter or digit that appears latest in the first response, so that the cut is not at its start
        word = max((c for c in set(texts[0][-1]) if c.isascii() and c.isalnum()), key=texts[0][-1].index)
        stopped = generate_all(engine, requests, dataclasses.replace(sampling, stop=(word,)))
    expected = [next((n for n, text in enumerate(prefixes, 1) if word in text), None) for prefixes in texts]
    differences = []
    for request, response in zip(requests, drawn):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequence(request, response)])).logits[0, len(request.prompt) - 1 : -1]
        chosen = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(response.tokens).long()[:, None])[:, 0]
        differences.append((chosen - torch.from_numpy(response.logprobs)).abs())
    return {
        "drawn": plain(drawn),
        "stopped": plain(stopped),
        "expected": expected,
        "metrics": metrics,
        "rounding": rounding,
        "mean": float(torch.cat(differences).mean()),
        "parameters": sum(tensor.numel() for tensor in model.state_dict().values()),
    }


def logit_rounding(engine: VllmEngine, model: torch.nn.Module) -> dict[str, float]:
    """Share of random targets whose log-prob is the same (to 1e-5) from vLLM's output layer and by the trainer's op, by
    `logits_dtype`: the same bf16 hidden states, scaled so that logits have standard deviation 8, at temperature 0.7.
    """
    generator = torch.Generator().manual_seed(3)
    weight = model.lm_head.weight.detach().bfloat16()
    hidden = torch.randn(300, weight.shape[1], generator=generator) * 8 / float(weight.float().norm(dim=1).mean())
    target = torch.randint(0, weight.shape[0], (300,), generator=generator)
    worker = engine._llm.llm_engine.model_executor.driver_worker.worker
    with engine._running(), torch.no_grad():
        logits = worker.get_model().compute_logits(hidden.bfloat16())
    sampler = torch.log_softmax(logits.float() / 0.7, -1).gather(1, target[:, None])[:, 0]
    equal = {}
    for dtype in ("fp32", "bf16"):
        trainer, _ = linear_logprob(
            hidden.bfloat16(), weight, target, None, vocab_start=0, num_valid=weight.shape[0], temperature=0.7, logits_dtype=dtype
        )
        equal[dtype] = float(((trainer - sampler).abs() < 1e-5).double().mean())
    return equal


def process_state() -> dict[str, Any]:
    return {
        "torch random": torch.get_rng_state().sum().item(),
        "numpy random": numpy.random.get_state()[1].sum(),
        "python random": hash(random.getstate()),
        "environment": dict(os.environ),
        "set_num_threads": torch.set_num_threads,
        "events": (torch.Event, torch.cuda.Event, torch.cuda.Stream, torch.cuda.current_stream),
        "threads": torch.get_num_threads(),
        "accelerator": (torch.accelerator.synchronize, torch.accelerator.empty_cache),
        "pin_memory": torch.Tensor.pin_memory,
        "record_stream": torch.Tensor.record_stream,
        "default dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
    }


def run_process(folder: str) -> dict[str, Any]:
    """The case of the same name again, with what an engine's life leaves behind in the process."""
    before = process_state()
    results = run_case(dist.get_rank(), folder, "llama to tp2")
    total = torch.ones(1)
    dist.all_reduce(total)
    after = process_state()
    changed = [f"{name}: {before[name]} -> {after[name]}" for name in after if after[name] != before[name]]
    return {**results, "changed": changed, "group": total.item(), "other_vllm": other_vllm()}


def other_vllm() -> str:
    """The error when one of the functions that the bridge stands on has other arguments."""
    from vllm.model_executor.model_loader.reload import layerwise

    real, layerwise.materialize_layer = layerwise.materialize_layer, lambda layer: None
    error = error_of(reload_api)
    layerwise.materialize_layer = real
    return error


def in_world(rank: int, folder: str) -> dict[str, Any]:
    process = run_process(folder)  # first, as its engine imports vLLM
    cases = {name: process if name == "llama to tp2" else run_case(rank, folder, name) for name in CASES}
    return {"process": process, "cases": cases, "tokenized": run_tokenized(folder), "kernels": wrapped_kernels()}


def wrapped_kernels() -> tuple[int, list[str]]:
    """(number of vLLM's Triton kernels with a stand-in on a CPU, those whose stand-in has a stand-in)"""
    from vllm.triton_utils import dispatcher

    stand_ins = dispatcher._registry
    twice = [name for name, (original, _) in stand_ins.items() if isinstance(original, dispatcher.KernelOverride)]
    return len(stand_ins), twice


# ----------------------------------------------------------------------------------------------------------------- tests


def write_multimodal(folder: Path, text: Path) -> None:
    """config.json of a vision-language checkpoint around this language model; weights never come from disk."""
    folder.mkdir()
    config = json.loads((text / "config.json").read_text())
    tied = config.pop("tie_word_embeddings")
    config.pop("architectures")
    vision = dict(
        model_type="pixtral",
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    whole = dict(
        architectures=["Mistral3ForConditionalGeneration"],
        model_type="mistral3",
        text_config=config,
        vision_config=vision,
        tie_word_embeddings=tied,
    )
    (folder / "config.json").write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, (case, changes, _, _) in CASES.items():
        (folder / name).mkdir()
        for seed, which in enumerate(("old", "new")):
            write_checkpoint(folder / name / which, case, seed=seed, **changes)
        if name.startswith("multimodal"):
            write_multimodal(folder / name / "multimodal", folder / name / "old")
    write_checkpoint(folder / "tokenized", "llama", head_dim=32, vocab_size=512)
    write_hf_tokenizer(folder / "tokenized")
    return spawn_world(in_world, RANKS, str(folder))


def test_vllms_groups_wait_as_long_as_the_run_says(world):
    for result in world:
        for case in result["cases"].values():
            assert case["limits"] == {"device": 302.0, "host": 402.0}


def test_a_start_without_tokenizer_is_silent_about_templates_of_chats(world):
    for result in world:
        quiet, plain = result["cases"]["llama to tp2"]["warmed up"]
        assert quiet == [] and plain == ["Chat template warmup failed"], "without the filter vLLM says it"


PUSHES = [pytest.param(name, (tp, pp), id=f"tp{tp}pp{pp} {name}") for name, case in CASES.items() for tp, pp in case[3]]


@pytest.mark.parametrize("name, layout", PUSHES)
def test_the_engine_computes_with_the_pushed_weights(world, name, layout):
    for result in world:
        for version, step in enumerate(result["cases"][name]["push"][layout], start=1):
            assert step["distance"] < TOLERANCE and step["greedy"]
            assert step["to_other"] > 0.1, "the comparison would not notice the other weights"
            assert step["version"] == {version}


@pytest.mark.parametrize("name", CASES)
def test_vllm_describes_its_parameters_as_its_layers_define_them(world, name):
    assert [result["cases"][name]["layout"] for result in world] == [[], []]


@pytest.mark.parametrize("name", CASES)
def test_the_plan_counts_what_vllm_holds(world, tmp_path, name):
    case, changes, tp, _ = CASES[name]
    write_checkpoint(tmp_path / "model", case, **changes)
    arch = read_arch(tmp_path / "model")
    planned = rollout_memory(arch, tp, 4, 1 / 32, 0.4, None)
    for result in world:
        held = result["cases"][name]["memory"]
        assert held["parameters"] * 4 == planned.weights
        assert held["cache_bytes"] == held["cache_tokens"] * planned.kv_bytes_per_token <= planned.kv_cache
    other = rollout_memory(arch, 3 - tp, 4, 1 / 32, 0.4, None)
    assert other.weights != planned.weights, "negative control: the other tp"


def test_equal_cuts_send_nothing_over_the_wire(world):
    for result in world:
        metrics = result["cases"]["llama to tp2"]["push"][2, 1][0]["metrics"]
        assert metrics["bytes_local"] > 0
        # vLLM pads the vocabulary to 192 rows and the policy to 132, so the embeddings alone are cut elsewhere
        assert 0 <= metrics["bytes_received"] <= 2 * 32 * 64 * 4


@pytest.fixture(scope="module")
def sampling(world) -> dict[str, Any]:
    first, second = (result["cases"]["llama to tp1 x 2"]["sampling"] for result in world)
    assert first == second, "every rank gets every response"
    return first


def test_sampled_logprobs_are_of_the_distribution_sampled_from(sampling):
    assert sampling["distance"] < TOLERANCE
    assert sampling["narrow_distance"] < TOLERANCE
    assert sampling["nucleus_distance"] < TOLERANCE


def test_seeds_reproduce_whatever_the_batch(sampling):
    tokens = lambda responses: [response["tokens"] for response in responses]
    assert tokens(sampling["again"]) == tokens(sampling["drawn"])
    assert sampling["alone"][0] == sampling["drawn"][2]
    assert all(a != b for a, b in zip(tokens(sampling["reseeded"]), tokens(sampling["drawn"])))
    assert len(set(map(tuple, tokens(sampling["drawn"])))) == len(sampling["drawn"])


def test_a_response_goes_on_from_what_was_drawn_before(sampling):
    """Its best tokens are those of one request, and its own limit ends it."""
    for whole, rest in zip(sampling["greedy"], sampling["going on"], strict=True):
        assert rest["tokens"] == whole["tokens"][5:9] and rest["finish"] == "length"
        assert rest["logprobs"] == pytest.approx(whole["logprobs"][5:9], abs=1e-4)


def test_a_stop_token_ends_the_response_and_is_part_of_it(sampling):
    ending, stopped = sampling["stopped"]
    for response, full in zip(stopped, sampling["drawn"]):
        tokens = full["tokens"]
        if ending in tokens:
            assert response["tokens"] == tokens[: tokens.index(ending) + 1] and response["finish"] == "stop"
        else:
            assert response["tokens"] == tokens and response["finish"] == "length"
        assert len(response["logprobs"]) == len(response["tokens"])
    assert {response["finish"] for response in stopped} == {"stop", "length"}
    assert sampling["ended"] == stopped, "an end-of-sequence token does the same"


def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(sampling):
    word, worded = sampling["worded"]
    cut = worded[1]
    tokens = cut["tokens"]
    assert cut["finish"] == "stop" and len(tokens) <= 9 and tokens == sampling["drawn"][1]["tokens"][: len(tokens)]
    text = "".join(f"<{token}>" for token in tokens)
    assert word in text and word not in "".join(f"<{token}>" for token in tokens[:-1])
    assert len(cut["logprobs"]) == len(tokens)


def test_vllm_finds_stop_strings_itself_where_it_has_the_tokenizer(world):
    for result in (world[0]["tokenized"], world[1]["tokenized"]):
        assert result["expected"][0] is not None and result["expected"][0] > 1
        for full, cut, length in zip(result["drawn"], result["stopped"], result["expected"]):
            assert cut["tokens"] == full["tokens"][:length] and cut["finish"] == ("length" if length is None else "stop")


def test_a_bf16_engine_gets_the_fp32_policy_rounded(world):
    for result in (world[0]["tokenized"], world[1]["tokenized"]):
        moved = result["metrics"]["bytes_received"] + result["metrics"]["bytes_local"]
        assert moved == 2 * result["parameters"] and result["metrics"]["verified"] == 1.0
        # statistical: bf16 activations differ from fp32 by about 2^-8 of logits of a few units; other weights differ by whole
        # units
        assert 0 < result["mean"] < 0.1


def test_logits_are_rounded_to_bf16_where_vllm_rounds_them(world):
    """Sums in another order may round a logit to its other neighbour, now and then."""
    for result in world:
        equal = result["tokenized"]["rounding"]
        assert equal["bf16"] > 0.98 and equal["fp32"] < 0.02


def test_requests_that_cannot_be_served_are_refused(sampling):
    assert "request 0: prompt of 250 tokens plus max_tokens 24" in sampling["errors"]["long"]
    assert "request 7: prompt of 0 tokens" in sampling["errors"]["empty"] and sampling["unfinished"] == 0, "none is added"
    assert "rollout.stop" in sampling["errors"]["stop"]
    assert sampling["none"] == []


@pytest.fixture(scope="module")
def faults(world) -> list[dict[str, Any]]:
    return [result["cases"]["llama to tp1 x 2"]["faults"] for result in world]


def test_a_flipped_bit_is_named_by_all_ranks_and_the_engine_refuses_to_work(faults):
    for fault in faults:
        assert "push of weights 3: rank 1: model.layers.0.self_attn.o_proj.weight arrived with checksum" in fault["flip"]
        assert "holds no weights" in fault["refuses"]
        assert fault["recovered"] < TOLERANCE


def test_nothing_is_computed_from_prefixes_of_older_weights(faults):
    """A push empties the cache, and its version is in the key of every prefix: each alone is enough."""
    for fault in faults:
        assert fault["no_reset"] < TOLERANCE and fault["no_salt_but_reset"] < TOLERANCE
        assert fault["no_salt"] > 0.1, "negative control: without both"


def test_a_wrong_weight_map_would_show_although_checksums_pass(faults):
    for fault in faults:
        assert fault["swap_verified"] == 1.0 and fault["swap"] > 0.1


def test_a_missing_rectangle_is_reported(faults):
    for fault in faults:
        assert "rectangles of model.embed_tokens missing" in fault["dropped"]


def test_vllm_leaves_the_process_as_it_was(world):
    for result in world:
        assert result["process"]["changed"] == []
        assert all(case["built"] == [] for case in result["cases"].values())
        assert result["process"]["group"] == RANKS, "the default process group works after close()"


def test_the_second_engine_of_a_process_does_not_wrap_kernels_again(world):
    for result in world:
        number, twice = result["kernels"]
        assert number > 0 and twice == []


def test_engines_leave_no_names_in_shared_memory(world):
    for result in world:
        assert all(case["shared_memory"] == [] for case in result["cases"].values())


def test_every_push_is_verified(world):
    for result in world:
        for name, case in CASES.items():
            verified = [step["metrics"]["verified"] for layout in case[3] for step in result["cases"][name]["push"][layout]]
            assert len(verified) > 1 and set(verified) == {1.0}


def test_generation_before_the_first_push_is_refused(world):
    assert all("holds no weights" in case["unpushed"] for result in world for case in result["cases"].values())


def test_a_vllm_that_reloads_differently_is_refused(world):
    for result in world:
        assert "materialize_layer(layer, info) is now (layer)" in result["process"]["other_vllm"]
