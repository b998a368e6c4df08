"""The model of the step time against runs on GPUs that others published: Narayanan et al. 2021, table 1, weak scaling of GPT from
1.7 billion to a trillion parameters on up to 3,072 A100.

As there: every layer recomputed, tensor parallel without sequence parallel, the interleaved schedule, an optimizer that is not
distributed, and the throughput by the paper's own count of FLOPs (section 5.1), which counts the recomputation. Micro-batches and
model chunks, which the table does not name, are the best that fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from megappo.commands.tune.enumerate import divisors, token_budgets
from megappo.config.role_sections import ParallelConfig
from megappo.telemetry.hardware import Hardware, load_hardware
from tests.commands.tune.test_known_layouts import GPT, GPT_LENGTH, GPT_RUNS, gpt, training

A100 = load_hardware("a100")


def predicted_tflops(folder: Path, name: str, hardware: Hardware = A100) -> float:
    """TFLOP/s of a GPU in an update, as the paper counts them."""
    heads, hidden, layers, tp, pp, gpus, batch, _ = GPT_RUNS[name]
    model = gpt(heads, hidden, layers)
    settings = {"recompute": "full", "optimizer": {"distributed": False}}
    search = training(folder, "policy", model, gpus, batch, GPT_LENGTH, hardware, **settings)
    found = []
    for vpp in divisors(layers // pp) if pp > 1 else [1]:
        for tokens in token_budgets(GPT_LENGTH, GPT_LENGTH):
            chosen = {"parallel": ParallelConfig(tp=tp, pp=pp, vpp=vpp), "micro_batch_tokens": tokens}
            one = search.candidate("policy", search.config.policy.model_copy(update=chosen))
            found += [one.cost.phases["update"]] if one is not None else []
    beside = GPT_LENGTH / (6 * hidden) + GPT["vocab_size"] / (16 * layers * hidden)
    flops = 96 * batch * GPT_LENGTH * layers * hidden**2 * (1 + beside)
    return flops / gpus / min(found) / 1e12


def ratio(folder: Path, name: str, hardware: Hardware = A100) -> float:
    return predicted_tflops(folder, name, hardware) / GPT_RUNS[name][-1]


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return {name: ratio(tmp_path_factory.mktemp("gpt"), name) for name in GPT_RUNS}


@pytest.mark.parametrize("name", GPT_RUNS)
def test_the_predicted_throughput_is_near_the_published_one(ratios: dict[str, float], name: str) -> None:
    """The smallest models are overestimated: the share of the peak that a profile names is that of large products."""
    assert 0.8 < ratios[name] < (1.4 if name in ("1.7B", "3.6B") else 1.2)


def test_the_median_error_of_pretraining_is_small(ratios: dict[str, float]) -> None:
    assert median(abs(one - 1) for one in ratios.values()) <= 0.07


@pytest.mark.parametrize("name", ["18B", "145B"])
def test_without_what_is_not_arithmetic_it_is_not_near(tmp_path: Path, name: str) -> None:
    """Negative control: with links and memory that cost nothing."""
    links = {"node_link_gb_s": 1e6, "network_gb_s": 1e6, "node_latency_us": 1e-3, "network_latency_us": 1e-3}
    free = replace(A100, **links, memory_tb_s=1e3)
    assert ratio(tmp_path, name, free) > 1.4
