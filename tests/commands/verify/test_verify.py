"""`megappo verify` end to end on two gloo ranks: a sound layout agrees, broken ones are named, bad input is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.verify import run as verify_run
from megappo.commands.verify.run import verify
from megappo.config.loading import load_config
from tests.commands.verify.models import write_config_json
from tests.forked_commands import ForkedRanks, run_command

ROOT = Path(__file__).parents[3]
CONFIG = """
run: {{device: cpu}}
policy: {{model: {model}, parallel: {{tp: 2, sequence_parallel: true}}, recompute: selective}}
critic: {{parallel: {{pp: 2}}}}
data: {{train: absent.jsonl}}
algorithm: {{mini_batch_size: 128, bootstrap_truncated: true}}
"""


@pytest.fixture(autouse=True)
def outside_a_launcher(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config(tmp_path) -> str:
    """A run of a model of which only config.json is there."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(model=write_config_json(tmp_path / "model", "qwen2")))
    return str(path)


def with_reward_model(config: str) -> list[str]:
    """Overrides of a reward model beside the other roles, with a vocabulary and a layout of its own."""
    judge = write_config_json(
        Path(config).parent / "judge", "llama3", architectures=["LlamaForSequenceClassification"], id2label={"0": "score"}
    )
    parts = "reward.parts=[{name: exact_match}, {model: reward_model}]"
    return [parts, f"reward_model.model={judge}", "reward_model.parallel.tp=2"]


def test_the_command_prints_the_table_and_agrees(config: str) -> None:
    """Of delta nets and experts, in fewer layers and columns than Qwen3-Next's."""
    facts = write_config_json(Path(config).parent / "next", "qwen3_next")
    run = [config, f"policy.model={facts}", *with_reward_model(config)]
    done = run_command("verify", *run, "--max-ranks", "2", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("  ")[0] + " " + line[12:32].strip() for line in done.stdout.splitlines() if line.endswith("  ok")]
    assert {
        f"{role} {quantity}"
        for role in ("policy", "critic")
        for quantity in (
            "loss",
            "gradient norm",
            "metrics",
            "gradients",
            "gradients, copies",
            "parameters",
            "parameters, copies",
        )
    } < set(rows)
    assert {
        "policy logprobs",
        "policy entropies",
        "critic values",
        "reference logprobs",
        "experience advantages",
        "reward_model scores",
    } < set(rows)
    assert "tp2 pp1 dp1 sp" in done.stdout and "tp1 pp2 dp1" in done.stdout
    assert done.stdout.splitlines()[-1] == "ok: all 23 quantities agree with those of one rank"
    assert done.stderr == ""


def test_a_forgotten_sum_of_gradients_is_found_with_its_tensor_and_its_axis(config: str, capfd, monkeypatch) -> None:
    """Negative control: under sequence parallel every tp rank has the gradient of its own tokens only."""
    monkeypatch.setattr("megappo.commands.launch.processes.ForkedProcesses", ForkedRanks)
    code = verify(load_config(config), "cpu", max_ranks=2, bisect=True, rank_module="tests.commands.verify.broken_ranks")
    lines = capfd.readouterr().out.splitlines()
    assert code == 1
    assert lines[-1].startswith("DIFFERS: policy gradients") and lines[-1].endswith("so it does with sequence_parallel alone")
    assert "norm.weight" in lines[-1] or ".bias" in lines[-1]
    outcome = dict(line.split(maxsplit=1) for line in lines if line.startswith(("tp ", "sequence_parallel ", "pp ", "dp ")))
    assert outcome["sequence_parallel"].startswith("DIFFERS: policy gradients")
    assert outcome["tp"] == outcome["pp"] == outcome["dp"] == "ok"
    differing = [line for line in lines if line.endswith("DIFFERS")]
    assert any(line.startswith("policy") and "gradients, copies" in line for line in differing)
    assert not any(line.startswith("critic") and " gradients" in line for line in differing), "it has no sequence parallelism"


def test_a_model_with_a_tower_is_verified_on_images(tmp_path, capfd, monkeypatch) -> None:
    """Policy and critic with their towers in tp with sequence parallel and in stages. Negative control: one rank gives images the
    positions of text."""
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(model=write_config_json(tmp_path / "model", "qwen3_vl")))
    monkeypatch.setattr("megappo.commands.launch.processes.ForkedProcesses", ForkedRanks)
    assert verify(load_config(path, ["data.image_key=images"]), "cpu", max_ranks=2) == 0
    assert "quantities agree with those of one rank" in capfd.readouterr().out
    code = verify(load_config(path), "cpu", max_ranks=2, rank_module="tests.commands.verify.broken_tower")
    assert code == 1 and "DIFFERS: critic values" in capfd.readouterr().out


# arguments after the configuration, what stderr must contain
BAD = [
    (["policy.model=absent"], ['policy.model = "absent"', "`hf download OWNER/NAME --local-dir absent`"]),
    (["policy.parallel.tp=4"], ["policy.parallel.tp = 4", "14 attention heads", "largest tp that works is 2"]),
    (["critic.parallel.pp=5"], ["critic.parallel.pp = 5", "does not divide the 24 layers", "4 or 6"]),
    (["critic.parallel.ep=2"], ["critic.parallel.ep = 2", "has none; set ep to 1"]),
    (["run.num_ranks=3", "critic.parallel.pp=1"], ["tp 2 x pp 1 = 2 does not divide the 3 ranks"]),
    (["run.num_ranks=4", "policy.ranks=0-1", "critic.ranks=2-4"], ['critic.ranks = "2-4"', "outside the world", "below 4"]),
    (["policy.ranks=0-1", "critic.ranks=3-4", "reference.ranks=0-1", "rollout.ranks=0-1"], ["rank 2 of the world would have no"]),
    (["policy.ranks=0-1", "critic.ranks=2-4"], ["critic.parallel", "does not divide the 3 ranks of critic.ranks = 2-4"]),
    (["critic.parallel.vp=2"], ["unknown key; did you mean critic.parallel.vpp?"]),
    (["rollout.sampling.temperature=0.0"], ["rollout.sampling.temperature = 0.0", "use a value > 0"]),
    (["run.device=cuda"], ["run.device = cuda", "run.device=cpu"]),
    (["--max-ranks", "0"], ["--max-ranks: 0 is not an integer >= 1"]),
    (["--tolerance", "-1"], ["--tolerance", "not a number > 0"]),
]


@pytest.mark.parametrize("arguments, fragments", BAD, ids=range(len(BAD)))
def test_bad_input_is_one_line_and_starts_nothing(config: str, capsys, monkeypatch, arguments, fragments) -> None:
    monkeypatch.setattr(verify_run, "start_worlds", lambda *_: pytest.fail("ranks were started"))
    assert cli.main(["verify", config, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(fragment in captured.err for fragment in fragments), captured.err


def test_it_is_not_run_by_a_launcher(config: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["verify", config]) == 2
    assert "run it once, without torchrun" in capsys.readouterr().err


PLACED = ["policy.ranks=0-1", "critic.ranks=2-5", "reference.ranks=0-1", "rollout.ranks=0-5"]


@pytest.mark.parametrize(
    "overrides, max_ranks, expected",
    [
        (PLACED, 6, (6, {"policy": "0-1", "critic": "2-5", "reference": "0-1", "rollout": "all"})),
        (PLACED, 5, (4, dict.fromkeys(("policy", "critic", "reference", "rollout"), "all"))),
        (PLACED, 3, (2, dict.fromkeys(("policy", "critic", "reference", "rollout"), "all"))),
        ([], 4, (4, dict.fromkeys(("policy", "critic", "reference", "rollout"), "all"))),
    ],
)
def test_placed_roles_have_ranks_of_their_own_where_the_small_world_has_room(
    config: str, monkeypatch, capsys, overrides: list[str], max_ranks: int, expected: tuple[int, dict[str, str]]
) -> None:
    """The layouts come first: tp 2 and pp 2 apart need four ranks. One rank alone has all roles on it."""
    started: list[tuple[int, dict[str, str]]] = []

    def start(worlds: list[tuple[int, list[str]]], module: str, preload: tuple[str, ...]) -> int:
        for world_size, (folder, *names) in worlds:
            for name in names:
                small = load_config(str(Path(folder) / f"{name}.json"))
                started.append((world_size, {role: getattr(small, role).ranks for role in expected[1]}))
        return 7

    monkeypatch.setattr(verify_run, "start_worlds", start)
    assert verify(load_config(config, overrides), "cpu", max_ranks=max_ranks) == 7
    assert started == [expected, (1, dict.fromkeys(expected[1], "all"))]
    printed = capsys.readouterr().out
    assert ("on ranks 2" in printed) == (expected[1]["critic"] != "all")
    notes = [line for line in printed.splitlines() if line.startswith("note:")]
    if overrides and expected[1]["critic"] == "all":
        assert notes[0].endswith("on all ranks of this small world; on ranks of their own they need --max-ranks 6")
        assert notes[1].endswith("compare trainer.steps=3 with one of policy.ranks=all critic.ranks=all reference.ranks=all")
    else:
        assert notes == []


def test_the_exit_code_of_a_failed_rank_is_handed_on(config: str, monkeypatch) -> None:
    monkeypatch.setattr(verify_run, "start_worlds", lambda *_: 7)
    assert verify(load_config(config), "cpu", max_ranks=2) == 7
