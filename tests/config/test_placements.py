"""The `ranks` of roles: what may be written, what it means, and which placements of roles a world refuses."""

import itertools
import random
import time

import pytest

from megappo.config.checks import problems
from megappo.config.errors import ConfigError
from megappo.config.layout_checks import placement_problems, placements_in_use, world_problems
from megappo.config.loading import explicit_keys
from megappo.config.rank_ranges import ranges_of, ranges_text, ranks_of
from tests.config.examples import TRAIN, sft_config, train_config

MEANT = [
    ("all", 3, (0, 1, 2)),
    ("0-2", 4, (0, 1, 2)),
    ("3", 4, (3,)),
    ("0-1,3", 4, (0, 1, 3)),
    ("0, 2-3", 4, (0, 2, 3)),
    ("0-0,1", 2, (0, 1)),
]


@pytest.mark.parametrize("text, world, ranks", MEANT)
def test_ranges_name_ranks(tmp_path, text, world, ranks):
    assert ranks_of(text, world) == ranks
    config = train_config(tmp_path, [f"critic.ranks={text}"])
    assert ranks_of(config.critic.ranks, world) == ranks


def test_one_rank_may_be_written_as_a_number(tmp_path):
    text = "policy: {model: some/model, ranks: 3}\ndata: {train: train.jsonl}\nrollout: {ranks: 0-3}\n"
    assert train_config(tmp_path, text=text).policy.ranks == "3"


def test_the_text_of_ranks_is_read_back_as_the_same_ranks():
    choose = random.Random(0)
    for world in range(1, 40):
        ranks = sorted(choose.sample(range(world), choose.randint(1, world)))
        assert ranks_of(ranges_text(ranks), world) == tuple(ranks)
        assert len(ranges_of(ranges_text(ranks))) == sum(1 for rank in ranks if rank - 1 not in ranks), "neighbours are one range"


MALFORMED = [
    ("", "'' is no range of ranks"),
    ("0,,1", "'' is no range of ranks"),
    ("first", "'first' is no range of ranks"),
    ("0-", "'0-' is no range of ranks"),
    ("-1", "'-1' is no range of ranks"),
    ("0:3", "'0:3' is no range of ranks"),
    ("0-1_0", "'0-1_0' is no range of ranks"),
    ("0-9999999999", "is no range of ranks"),
    ("ALL", "write all, a range (0-47)"),
    ("5-2", "the range 5-2 runs backwards; write 2-5"),
    ("0-3,2-5", "the ranges 0-3 and 2-5 overlap"),
    ("1,1", "the ranges 1 and 1 overlap"),
    ("4-5,0-1", "the range 0-1 comes after 4-5; write the ranges in increasing order"),
]


@pytest.mark.parametrize("text, message", MALFORMED)
def test_malformed_ranges_are_refused_when_they_are_read(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        train_config(tmp_path, [f"reference.ranks={text!r}"])
    said = str(error.value)
    assert said.startswith("command line: reference.ranks = ") and message in said and "\n" not in said, said


@pytest.mark.parametrize("value", ["[0, 1]", "true", "1.5", "{a: 1}"])
def test_other_types_are_refused(tmp_path, value):
    text = f"policy: {{model: some/model}}\ndata: {{train: train.jsonl}}\ncritic:\n  ranks: {value}\n"
    with pytest.raises(ConfigError, match="critic.ranks = .*: must be a string"):
        train_config(tmp_path, text=text)
    with pytest.raises(ConfigError, match="critic.ranks = .* is no range of ranks; write all"):
        train_config(tmp_path, [f"critic.ranks={value}"])  # an override of a text is that text


SPLIT = ["policy.ranks=0-1", "critic.ranks=2-3", "reference.ranks=0-1", "rollout.ranks=0-3"]
# overrides of SPLIT, ranks of the world, what the message must contain
REFUSED = [
    (["critic.ranks=2-4"], 4, ['critic.ranks = "2-4"', "2-4 is outside the world, which has ranks 0-3", "below 4"]),
    (["rollout.ranks=4"], 4, ['rollout.ranks = "4"', "4 is outside the world"]),
    ([], 1, ['policy.ranks = "0-1"', "0-1 is outside the world, which has rank 0 only"]),
    (["policy.ranks=0-999999999"], 4, ["policy.ranks", "0-999999999 is outside the world"]),
    (
        ["policy.parallel.tp=4"],
        4,
        ["policy.parallel: tp 4 x pp 1 = 4 does not divide the 2 ranks of policy.ranks = 0-1", "use 4 ranks (policy.ranks)"],
    ),
    (
        ["critic.ranks=1-3", "critic.parallel.pp=2"],
        4,
        ["critic.parallel: tp 1 x pp 2 = 2 does not divide the 3 ranks of critic.ranks = 1-3", "use 2 or 4 ranks (critic.ranks)"],
    ),
    (["policy.parallel.ep=4"], 4, ["policy.parallel.ep = 4", "the 2 ranks of a pipeline stage (2 ranks / pp 1)", "use 2"]),
    (
        ["rollout.ranks=1-3", "rollout.tp=2"],
        4,
        ["rollout.tp = 2", "the 3 ranks of rollout.ranks = 1-3 into replicas", "use 2 or 4 ranks (rollout.ranks)"],
    ),
    (["rollout.ranks=0-1"], 5, ['rollout.ranks = "0-1"', "rank 4 of the world would have no role", "policy.ranks"]),
    (["rollout.ranks=0-1"], 7, ['rollout.ranks = "0-1"', "ranks 4-6 of the world would have no role"]),
    (
        ["trainer.steps=3", "critic.warmup.steps=3", "critic.warmup.trajectories=runs/x"],
        4,
        ['critic.ranks = "2-3": ranks 0-1 of the world would have no role; add them here, or start fewer ranks'],
    ),
    (["rollout.engine=megatron"], 4, ['rollout.ranks = "0-3"', "the policy's own shards; set it to policy.ranks, 0-1"]),
    (
        ["critic.offload=[optimizer]", "rollout.ranks=0-1"],
        4,
        ['critic.offload = ["optimizer"]', "none shares critic.ranks = 2-3"],
    ),
    (["rollout.sleep=all", "rollout.ranks=4-5"], 6, ['rollout.sleep = "all"', "none is on rollout.ranks = 4-5"]),
]


@pytest.mark.parametrize("changes, world, fragments", REFUSED)
def test_a_placement_that_cannot_work_is_refused(tmp_path, changes, world, fragments):
    config = train_config(tmp_path, [*SPLIT, *changes])
    begun = time.process_time()
    said = next(problems(config, explicit_keys(config), world))
    assert "\n" not in said and all(fragment in said for fragment in fragments), said
    assert time.process_time() - begun < 1, "a range is not listed before it is refused"


@pytest.mark.parametrize(
    "changes, world",
    [
        ([], 4),
        (["policy.parallel.tp=2", "critic.parallel.pp=2"], 4),
        (["rollout.engine=megatron", "rollout.ranks=0-1"], 4),
        (["rollout.ranks=4-7", "rollout.tp=4"], 8),
        (["critic.offload=[optimizer]"], 4),  # beside the rollout
        # Critics alone, with what the run that follows offloads.
        (
            [
                *("trainer.steps=3", "critic.warmup.steps=3", "critic.warmup.trajectories=runs/x", "critic.ranks=all"),
                *("critic.offload=[optimizer]", "rollout.sleep=all", "rollout.tp=3"),
            ],
            4,
        ),
        (["rollout.sleep=all"], 4),
        (["reference.ranks=all"], 4),
        # a reference that is not built may be left anywhere
        (["reference=null", "algorithm.kl.placement=none"], 4),
    ],
)
def test_a_placement_that_works_passes(tmp_path, changes, world):
    config = train_config(tmp_path, [*SPLIT, *changes])
    assert next(problems(config, explicit_keys(config), world), None) is None


def test_a_role_that_is_not_built_is_not_placed(tmp_path):
    config = train_config(tmp_path, ["algorithm.kl.placement=none"])
    assert list(placements_in_use(config)) == ["policy", "critic", "rollout"]


def test_every_rank_has_work_exactly_if_no_problem_says_otherwise(tmp_path):
    """The check against a count of its own, over all placements on intervals of three ranks."""
    intervals = ["0", "1", "2", "0-1", "1-2", "0-2"]
    for policy, critic, rollout in itertools.product(intervals, repeat=3):
        overrides = [f"policy.ranks={policy}", f"critic.ranks={critic}", f"rollout.ranks={rollout}", "algorithm.kl.placement=none"]
        config = train_config(tmp_path, overrides)
        busy = {rank for text in (policy, critic, rollout) for rank in range(int(text[0]), int(text[-1]) + 1)}
        assert bool(list(placement_problems(config, 3))) == (len(busy) < 3), overrides


def test_fine_tuning_takes_all_ranks(tmp_path):
    said = next(world_problems(sft_config(tmp_path, ["policy.ranks=0-1"]), 4))
    assert said == 'policy.ranks = "0-1": fine-tuning trains its one model on all ranks; leave it out, or start fewer ranks'
    assert next(world_problems(sft_config(tmp_path), 4), None) is None


def test_fine_tuning_may_leave_ranks_to_what_generates(tmp_path):
    asked = ["rollout.tp=2", "policy.ranks=0-1"]
    assert next(world_problems(sft_config(tmp_path, [*asked, "rollout.ranks=2-3"]), 4), None) is None
    said = [next(world_problems(sft_config(tmp_path, [*asked, ranks]), 4)) for ranks in ("rollout.ranks=2", "rollout.ranks=1-2")]
    assert "rank 3 of the world would have no role and generate nothing" in said[0]
    assert "rank 3" in said[1]
    said = next(world_problems(sft_config(tmp_path, [*asked, "rollout.ranks=1-3"]), 4))
    assert "rollout.tp = 2: does not divide the 3 ranks" in said
    by_policy = ["rollout.engine=megatron", "policy.ranks=0-1", "rollout.ranks=2-3"]
    assert "generates with the policy's own shards" in next(world_problems(sft_config(tmp_path, by_policy), 4))


def test_the_default_is_every_rank(tmp_path):
    assert set(placements_in_use(train_config(tmp_path, text=TRAIN)).values()) == {"all"}
