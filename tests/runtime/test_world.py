"""Ranks, sizes, address and port, from torchrun's variables or from Slurm's, and refusals where the two disagree."""

from __future__ import annotations

import pytest

from megappo.commands.launch.node import rendezvous
from megappo.config.run_sections import RunConfig
from megappo.runtime.world import FIRST_PORT, NUM_PORTS, first_host, is_rank, join_srun, port_of, tasks_per_node, world_size


def task(rank: int, num_tasks: int, per_node: str, *, local: int, node: int, **more: str) -> dict[str, str]:
    """Variables that slurmstepd sets for one task of step 2 of job 4711 on gpu03, gpu04, ..."""
    nodes = len(tasks_per_node(per_node))
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": f"gpu[03-{2 + nodes:02d}]",
        "SLURMD_NODENAME": f"gpu{3 + node:02d}",
        **more,
    }


def torchrun(rank: int, size: int, local_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
    }


def test_a_task_of_srun_becomes_a_rank() -> None:
    env = task(5, 16, "8(x2)", local=5, node=0)
    join_srun(env)
    port = str(port_of(4711, 2))
    expected = {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    assert (expected | {"MASTER_ADDR": "gpu03", "MASTER_PORT": port}).items() <= env.items()


def test_an_address_of_this_host_is_right_on_one_node_and_where_it_is_the_nodes_name() -> None:
    for env in (task(1, 2, "2", local=1, node=0), task(1, 2, "1(x2)", local=0, node=1, SLURM_STEP_NODELIST="127.0.0.[1-2]")):
        env["MASTER_ADDR"] = "127.0.0.1"
        join_srun(env)
        assert env["MASTER_ADDR"] == "127.0.0.1"


def test_nodes_may_have_different_numbers_of_tasks() -> None:
    env = task(9, 10, "8,2", local=1, node=1)
    join_srun(env)
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("1", "2")


def test_address_and_port_that_the_user_chose_are_kept() -> None:
    env = task(1, 2, "2", local=1, node=0, MASTER_ADDR="10.0.0.7", MASTER_PORT="4000")
    join_srun(env)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.7", "4000")


def test_what_enroots_hook_for_pytorch_images_leaves_out_is_added() -> None:
    """It sets RANK, LOCAL_RANK and WORLD_SIZE, address and port where scontrol is at hand, and no LOCAL_WORLD_SIZE."""
    env = task(9, 16, "8(x2)", local=1, node=1, RANK="9", WORLD_SIZE="16", LOCAL_RANK="1", MASTER_PORT="61007")
    join_srun(env)
    expected = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    assert (expected | {"MASTER_ADDR": "gpu03", "MASTER_PORT": "61007"}).items() <= env.items()


@pytest.mark.parametrize("visible, local_rank", [("3", "0"), ("0,1,2,3", "3"), ("", "3")])
def test_a_task_that_sees_one_gpu_uses_that_one(visible: str, local_rank: str) -> None:
    env = task(3, 4, "4", local=3, node=0, CUDA_VISIBLE_DEVICES=visible)
    join_srun(env)
    assert env["LOCAL_RANK"] == local_rank


BATCH_SCRIPT = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "2"}
LEFT_ALONE = {
    "no launcher": {},
    "a batch script of one node": BATCH_SCRIPT | {"SLURM_JOB_NUM_NODES": "1"},
    "torchrun, by ssh": BATCH_SCRIPT | torchrun(3, 16, 8),
    "one task": task(0, 1, "1", local=0, node=0),
    "torchrun alone": torchrun(3, 8, 8),
    "torchrun in one task per node": torchrun(3, 16, 8) | task(0, 2, "1(x2)", local=0, node=0),
    "torchrun in the only task": torchrun(3, 8, 8) | task(0, 1, "1", local=0, node=0),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_another_launcher_described_is_left_alone(case: str) -> None:
    env = dict(LEFT_ALONE[case])
    join_srun(env)
    assert env == LEFT_ALONE[case]


DISAGREEMENTS = {
    "a shell exports RANK": (
        {"RANK": "0", "WORLD_SIZE": "1"} | task(3, 8, "4(x2)", local=3, node=0),
        "RANK=0 and WORLD_SIZE=1 are set, but this is task 3 of 8 of srun: unset both",
    ),
    "a shell exports MASTER_ADDR": (
        {"MASTER_ADDR": "localhost"} | task(3, 8, "4(x2)", local=3, node=0),
        "MASTER_ADDR=localhost is set, which each of the 2 nodes takes for itself: unset it .* or set it to gpu03",
    ),
    "torchrun without rendezvous": (
        torchrun(1, 8, 8) | task(1, 2, "1(x2)", local=0, node=1),
        "in each of them a world of its own of 8 ranks: give torchrun --nnodes 2 --rdzv-backend c10d",
    ),
    "torchrun in every task": (
        torchrun(1, 64, 4) | task(1, 16, "8(x2)", local=1, node=0),
        "start torchrun in one task per node",
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_two_launchers_that_disagree_are_refused(case: str) -> None:
    env, message = DISAGREEMENTS[case]
    with pytest.raises(ValueError, match=message):
        join_srun(env)


@pytest.fixture
def outside_a_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_launchers_world_counts(outside_a_launcher: pytest.MonkeyPatch) -> None:
    assert not is_rank() and world_size(RunConfig(device="cpu")) == 1 and world_size(RunConfig(num_ranks=3)) == 3
    outside_a_launcher.setenv("RANK", "0")
    outside_a_launcher.setenv("WORLD_SIZE", "4")
    assert is_rank() and world_size(RunConfig()) == world_size(RunConfig(num_ranks=4)) == 4
    with pytest.raises(ValueError, match="set run.num_ranks=4 or null"):
        world_size(RunConfig(num_ranks=2))


def test_a_batch_script_of_several_nodes_without_srun_is_refused() -> None:
    """It would train on the first node and leave the others idle."""
    with pytest.raises(ValueError, match="this Slurm job has 2 nodes, and only this one would be used"):
        join_srun(dict(BATCH_SCRIPT))


@pytest.mark.parametrize(
    "nodelist, host",
    [
        ("gpu03", "gpu03"),
        ("gpu[03-06,9],login1", "gpu03"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]-node[07-09]", "rack1-node07"),
        ("127.0.0.[1-2]", "127.0.0.1"),
        ("n[5,1-3]-ib", "n5-ib"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_lists_that_are_none_are_refused() -> None:
    for text in ("", "[", "2(y3)"):
        with pytest.raises(ValueError, match="SLURM_STEP"):
            tasks_per_node(text) if text.startswith("2") else first_host(text)


def test_jobs_and_steps_near_each_other_have_different_ports() -> None:
    """Every job of the last hundred on a host, with eight steps each."""
    ports = [port_of(job, step) for job in range(5_000_000, 5_000_100) for step in range(8)]
    assert len(set(ports)) == len(ports)
    assert FIRST_PORT <= min(ports) and max(ports) < FIRST_PORT + NUM_PORTS <= 32768


def test_torchrun_on_a_node_takes_the_rendezvous_from_slurm() -> None:
    first, second = (rendezvous(task(n, 2, "1(x2)", local=0, node=n, SLURM_RESTART_COUNT="1")) for n in (0, 1))
    options = dict(zip(first[::2], first[1::2]))
    assert options == {
        "--nnodes": "2",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"gpu03:{port_of(4711, 2)}",
        "--rdzv-id": "4711.2.1",
        "--rdzv-conf": "is_host=true",
        "--local-addr": "gpu03",
        "--max-restarts": "0",
        "--signals-to-handle": "SIGINT,SIGHUP,SIGQUIT",
    }
    assert [word for word in second if word not in first] == ["is_host=false", "gpu04"]
    with pytest.raises(ValueError, match="one task per node"):
        rendezvous(task(0, 4, "2(x2)", local=0, node=0))
    with pytest.raises(ValueError, match="without Slurm use torchrun itself"):
        rendezvous({})
