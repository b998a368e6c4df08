"""scripts/pipeline.sh: its pairs are of right and wrong answers, and megappo takes every command of it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from megappo.commands import cli
from megappo.commands.sft import COMMANDS
from megappo.config.checks import problems
from megappo.config.loading import explicit_keys, load_run
from scripts.preference_pairs import answers_of, pairs_of

ROOT = Path(__file__).parents[2]
SUMS = [{"prompt": f"00{a}+{b}=", "answer": str(a + b)[::-1]} for a, b in ((7, 8), (1, 2), (9, 9), (5, 5))]


def test_a_pair_has_the_right_answer_and_a_wrong_one() -> None:
    answers = [
        ["5", "51", "6", "5"],
        ["3"] * 4,
        ["8", "71", "8", "9"],
        ["", "\ufffd1", "01", "01"],
    ]  # some right; all; none; no text
    assert list(pairs_of(SUMS, answers)) == [{"prompt": "007+8=", "chosen": "51", "rejected": wrong} for wrong in ("5", "6")]
    with pytest.raises(ValueError, match="shorter"):
        list(pairs_of(SUMS, answers[:3]))


def test_answers_are_read_as_megappo_generate_prints_them() -> None:
    prompts = ["1+1=", "1+1=", "2+2="]
    assert answers_of("1+1=\n2\n\n1+1=\n\n\n2+2=\n4\n\n", prompts) == ["2", "", "4"]
    for broken in ("1+1=\n2\n\n1+1=\n\n\n2+2=\n4\n", "1+1=\n2\n\n2+2=\n4\n\n1+1=\n\n\n", "a warning\n1+1=\n2\n\n"):
        with pytest.raises(SystemExit, match="not 3 prompts"):
            answers_of(broken, prompts)


def test_megappo_takes_every_command_of_the_pipeline(tmp_path: Path) -> None:
    call = [ROOT / "scripts" / "pipeline.sh", "--dry-run", "--out", tmp_path / "out", "--seed", "3"]
    said = subprocess.run(call, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in said.splitlines() if " -m megappo " in line]
    commands = [line[line.index("megappo") + 1 :] for line in lines]
    assert [one[0] for one in commands] == ["sft", "train-reward-model", "train", "dpo", "eval", "eval", "compare"]
    kinds = {name: kind for kind, (name, _) in COMMANDS.items()}
    for arguments in commands[:-1]:
        args = cli.build_parser().parse_args(arguments)
        config = load_run(ROOT / args.config, args.overrides, kinds.get(args.command))
        assert not list(problems(config, explicit_keys(config), 2)), arguments
        assert config.run.output_dir == str(tmp_path / "out") or args.command == "eval"
        assert config.run.seed == (0 if args.command == "eval" else 3)
    cli.build_parser().parse_args(commands[-1])
    assert not list(tmp_path.iterdir())
    # Negative control: a key without effect is seen in the same way.
    args = cli.build_parser().parse_args([*commands[2], "critic.value_head=zero", "reward.parts=[{name: exact_match}]"])
    config = load_run(ROOT / args.config, args.overrides)
    assert "reward_model" in " ".join(map(str, problems(config, explicit_keys(config), 2)))
