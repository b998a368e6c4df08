"""PPO by `megappo launch` on two nodes, of which the first one trains and the second one generates.

The oracle is a run that does both on the same two ranks, forked from a process that has imported everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands.launch.cluster import NODES, Cluster
from tests.commands.launch.test_ppo_on_slurm import (
    QUICKSTART,
    ROOT,
    START_S,
    STEP_S,
    Launched,
    are_running,
    launch,
    overrides_of,
    process_of,
    write_quickstart,
)
from tests.trainer.small_run import TOLERANCE, check_same_numbers
from tests.trainer.test_placed_run import responses, rows
from tests.worlds import spawn_world

STEPS = 8  # of half a second: the ranks are looked at after the first one
TRAINING, GENERATING = (0, 1), (2, 3)
BOTH = {
    "critic.warmup": "null",
    "rollout.engine": "vllm",
    "rollout.tp": 2,
    "rollout.kv_cache_gib": 0.03,
    "telemetry.trajectories_every": 1,
    "telemetry.trajectories_per_step": 16,
}
APART = {"policy.ranks": "0-1", "critic.ranks": "0-1", "reference.ranks": "0-1", "rollout.ranks": "2-3"}


@dataclass(frozen=True)
class Seen:
    """A rank between two steps."""

    node: str
    has_vllm: bool


def see(rank: int, launched: Launched) -> Seen:
    process = process_of(rank, launched)
    # The library that vLLM computes with: a module of Python that is imported alone costs nothing.
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    return Seen(process.environ()["SLURMD_NODENAME"], "/vllm/_C" in mapped)


@dataclass
class Story:
    """Events of the job. seen: its ranks, in order. In the folder is the run `colocated` too."""

    folder: Path
    apart: Launched
    seen: list[Seen]


def run_colocated(rank: int, folder: Path) -> None:
    from tests.trainer.recipe_runs import run

    run(QUICKSTART, overrides_of(folder, "colocated", STEPS, **BOTH), resume=False)


@pytest.fixture(scope="module")
def story(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("apart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        patch.chdir(ROOT)
        write_quickstart(folder)
        apart = launch(folder, "apart", STEPS, "--gpus-per-node", "2", **BOTH, **APART)
    cluster.wait_for("the job", lambda: are_running(cluster, apart), STEP_S, apart.log)
    cluster.wait_for("a step", lambda: 1 in apart.steps() or cluster.has_ended(apart.job), START_S, apart.log)
    assert apart.steps(), apart.log.read_text()
    seen = [see(rank, apart) for rank in (*TRAINING, *GENERATING)]
    spawn_world(run_colocated, 2, folder, timeout_s=START_S)
    cluster.wait_for("the end", lambda: cluster.has_ended(apart.job), START_S, apart.log)
    return Story(folder, apart, seen)


def test_it_finishes(story: Story) -> None:
    said = story.apart.log.read_text()
    assert said.splitlines()[-1] == f"megappo: finished; results in {story.apart.run}", said
    assert story.apart.steps() == list(range(1, STEPS + 1))


def test_the_second_node_generates_and_the_first_one_is_free_of_vllm(story: Story) -> None:
    assert [story.seen[rank] for rank in TRAINING] == [Seen(NODES[0], has_vllm=False)] * 2
    assert [story.seen[rank] for rank in GENERATING] == [Seen(NODES[1], has_vllm=True)] * 2


def test_weights_that_cross_nodes_change_no_number(story: Story) -> None:
    """Nor a token, in any step."""
    ours, theirs = rows(story.folder, "apart"), rows(story.folder, "colocated")
    assert len(ours) == len(theirs) == STEPS
    check_same_numbers(ours, theirs)
    # A mean of signed numbers: of some machine's samples it is small in one step or another.
    assert max(abs(row["kl/per_token"]) for row in theirs) > 10 * TOLERANCE, "weights that stayed behind would be seen"
    assert len(responses(story.folder, "apart")) == STEPS * 16
    assert responses(story.folder, "apart") == responses(story.folder, "colocated")
