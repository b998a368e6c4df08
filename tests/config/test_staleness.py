"""Keys of generation beside training: each that cannot go with it is refused in one line, and its mend passes."""

from __future__ import annotations

from megappo.config.checks import problems
from megappo.config.loading import explicit_keys
from tests.config.examples import train_config

RANKS = [f"{role}.ranks=0-1" for role in ("policy", "critic", "reference")] + ["rollout.ranks=2"]
ASYNCHRONOUS = [*RANKS, "rollout.max_staleness=2", "algorithm.importance_sampling.type=tis"]
AVERAGE = ["policy.ema.decay=0.9", "trainer.evaluate_with=ema", "data.eval=e.jsonl", "trainer.eval_every=1"]
# (overrides that are refused, what the line says, what mends it)
REFUSED = [
    (["policy.ranks=all"], ['policy.ranks = "all": ranks 2 only generate', "use 0-1"], "policy.ranks=0-1"),
    (["critic.ranks=1-2"], ['critic.ranks = "1-2": ranks 2 only generate', "use 0-1"], "critic.ranks=0-1"),
    (["rollout.ranks=all"], ['rollout.ranks = "all"', "needs ranks of its own"], "rollout.ranks=2"),
    (
        ["rollout.ranks=1", "policy.ranks=0,2"],
        ['rollout.ranks = "1"', "generates on the last ranks, and not on all; use 1-2"],
        None,
    ),
    (["rollout.sleep=cache"], ['rollout.sleep = "cache"', "use none"], "rollout.sleep=none"),
    (
        ["rollout.push_every=2"],
        ["rollout.push_every = 2", "every step pushes, into running requests; use 1"],
        "rollout.push_every=1",
    ),
    (
        ["rollout.partial_rollout_tokens=64"],
        ["rollout.partial_rollout_tokens = 64", "run on beside"],
        "rollout.partial_rollout_tokens=null",
    ),
    (
        [*AVERAGE, "rollout.environment.path=e.py", "rollout.environment.function=f"],
        ["would go on under the average; use policy"],
        "trainer.evaluate_with=policy",
    ),
    (["rollout.engine=megatron"], ["rollout.engine is megatron"], "rollout.engine=vllm"),
]


def found(folder, overrides):
    config = train_config(folder, overrides)
    return list(problems(config, explicit_keys(config), 3))


def test_what_cannot_go_with_generation_beside_training_is_refused_and_mended(tmp_path):
    assert found(tmp_path, ASYNCHRONOUS) == found(tmp_path, [*ASYNCHRONOUS, *AVERAGE]) == []
    for overrides, words, mend in REFUSED:
        lines = found(tmp_path, [*ASYNCHRONOUS, *overrides])
        assert any(all(word in line for word in words) for line in lines), (overrides, lines)
        assert mend is None or found(tmp_path, [*ASYNCHRONOUS, *overrides, mend]) == [], mend


def test_stale_responses_ask_for_a_correction_by_name_and_fresh_ones_do_not(tmp_path):
    unnamed = ASYNCHRONOUS[:-1]
    (line,) = found(tmp_path, unnamed)
    assert line.startswith('algorithm.importance_sampling.type = "none": responses of older weights ask for a choice')
    assert found(tmp_path, [*unnamed, "algorithm.importance_sampling.type=none"]) == []
    assert found(tmp_path, [*unnamed, "rollout.max_staleness=0"]) == []
