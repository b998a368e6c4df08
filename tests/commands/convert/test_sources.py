"""Reading other trainers' files: bash's quotes, variables and arrays, YAML's references, Python's literals; nothing is executed."""

import pytest

from megappo.commands.convert.conversion import convert
from megappo.commands.convert.shell import UNREAD, parse_shell
from megappo.commands.convert.sources import Unread, read_source
from megappo.config.errors import ConfigError
from megappo.config.foreign.rule import Outcome

# script -> words of its last command, as bash has them
WORDS = [
    ("echo a b", ["echo", "a", "b"]),
    ("echo a \\\n  b", ["echo", "a", "b"]),
    ("echo 'a b' \"c d\" e\\ f", ["echo", "a b", "c d", "e f"]),
    ("X=1\necho $X ${X} \"$X\" '$X' \\$X", ["echo", "1", "1", "1", "$X", "$X"]),
    ("X='a b'\necho $X \"$X\"", ["echo", "a", "b", "a b"]),
    ("X=\"['$HOME/a', 'b']\"\necho \"$X\"", ["echo", "['/home/u/a', 'b']"]),
    ("echo ${NOT_SET:-d} ${NOT_SET-e} k=${X:-${HOME}}", ["echo", "d", "e", "k=/home/u}"[:-1]]),
    ("echo ${NOT_SET:-x_${X_Y:-d}_y} ${HOME:-${NOT_SET}} ${NOT_SET:-{}}", ["echo", "x_d_y", "/home/u", "{}"]),
    ("X='$HOME'\necho $X ${X}", ["echo", "$HOME", "$HOME"]),
    (
        'X=1024\necho a=$((X * 3 + 8/2)) "$(( ${X} - 1 ))" $((Y)) $((1/0)) $((X ** 2))',
        ["echo", "a=3076", "1023", *[f"{UNREAD}$(...)"] * 3],
    ),
    ("A=(a=1 'b c' # why\n d)\necho \"${A[@]}\" z", ["echo", "a=1", "b c", "d", "z"]),
    ('A=(1)\nA+=(2)\necho "${A[@]}"', ["echo", "1", "2"]),
    ("export X=1 Y=2; echo $X$Y", ["echo", "12"]),
    ("echo a 2>&1 | tee log", ["tee", "log"]),
    ("echo a > out 2>&1", ["echo", "a"]),
    ("echo a#b # c", ["echo", "a#b"]),
    ("echo 'it''s' \"a\\\"b\"", ["echo", "its", 'a"b']),
    ("# echo no\necho yes $@", ["echo", "yes"]),
    ("if true; then\n  echo x\nfi\necho ${x[0]} last", ["echo", f"{UNREAD}${{x[0]}}", "last"]),
    ("echo k=$(rm -rf /) `date` $((1 + (2))) l", ["echo", f"k={UNREAD}$(...)", f"{UNREAD}$(...)", f"{UNREAD}$(...)", "l"]),
]


@pytest.mark.parametrize("text, words", WORDS)
def test_words_are_those_of_bash(text, words):
    commands = parse_shell(text, "here", {"HOME": "/home/u"}).commands
    assert commands[-1] == words


@pytest.mark.parametrize("piece, copies", [("$", 30_000), ("${A:-", 1_000), ("${A:-x}", 5_000)])
def test_a_hostile_word_ends(piece, copies):
    assert parse_shell(f"echo {piece * copies}{'}' * (copies if piece.endswith('-') else 0)}", "here", {}).commands


def test_a_variable_that_is_set_nowhere_is_not_guessed():
    (words,) = parse_shell("run a=$NOWHERE b=${NOWHERE}/x", "here", {}).commands
    assert words == ["run", f"a={UNREAD}$NOWHERE", f"b={UNREAD}${{NOWHERE}}/x"]


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_hydra_overrides_are_read_as_yaml_values(tmp_path):
    text = (
        "python -m verl.trainer.main_ppo --config-name=x a.b=1e-6 +c.d=True e.f='x' g.h=\"['a','b']\" i.j=null k.l=$(date) m.n=\n"
    )
    source = read_source(write(tmp_path, "run.sh", text))
    assert source.trainer.name == "verl"
    assert source.values == {
        "a.b": 1e-6,
        "c.d": True,
        "e.f": "x",
        "g.h": ["a", "b"],
        "i.j": None,
        "k.l": Unread("$(...)"),
        "m.n": None,
        "--config-name": "x",
    }


def test_every_word_behind_a_command_of_hydra_has_a_fate(tmp_path):
    words = (
        "-cn ppo_trainer --multirun seed=1 +new=2 ~data.seed ~a.b=3 actor@actor_rollout_ref.actor=dp_actor data.train_batch_size=8"
    )
    source = read_source(write(tmp_path, "run.sh", f"python -m verl.trainer.main_ppo {words} stray $UNSET_HERE\n"))
    assert source.values == {
        "--config-name": "ppo_trainer",
        "--multirun": True,
        "seed": 1,
        "new": 2,
        "~data.seed": None,
        "~a.b": 3,
        "actor@actor_rollout_ref.actor": "dp_actor",
        "data.train_batch_size": 8,
    }
    assert [note.partition(":")[0] for note in source.notes] == ["stray", "$UNSET_HERE"]
    outcomes = {row.key: row.outcome for row in convert(source).rows if not row.is_default}
    assert outcomes == {
        "--config-name": Outcome.IMPLIED,
        "--multirun": None,
        "seed": None,
        "new": None,
        "~data.seed": Outcome.MISSING,
        "~a.b": Outcome.MISSING,
        "actor@actor_rollout_ref.actor": Outcome.UNNEEDED,
        "data.train_batch_size": Outcome.TAKEN,
    }


def test_a_comment_inside_a_command_ends_it_as_in_bash(tmp_path):
    lines = ["python -m verl.trainer.main_ppo data.train_batch_size=8", "# data.seed=1", "trainer.test_freq=1", "trainer.nnodes=2"]
    text = " \\\n  ".join(lines) + "\n"
    source = read_source(write(tmp_path, "run.sh", text))
    assert source.values == {"data.train_batch_size": 8}
    assert [note.split(":")[0] for note in source.notes] == ["trainer.test_freq=1", "trainer.nnodes=2"]


def test_a_command_that_names_a_file_of_keys_says_so(tmp_path):
    source = read_source(write(tmp_path, "run.sh", "uv run examples/run_ppo.py --config a.yaml ppo.seed=1 cluster.num_nodes=2\n"))
    assert source.trainer.name == "NeMo-RL" and source.values == {"--config": "a.yaml", "ppo.seed": 1, "cluster.num_nodes": 2}
    assert convert(source).lost == ['--config = "a.yaml": that file has more keys: convert it, or the merged configuration']
    write(tmp_path, "a.yaml", "ppo: {seed: 7, ppo_epochs: 2, max_num_steps: 3}\n")
    beside = read_source(tmp_path / "run.sh")
    assert beside.values == {"ppo.seed": 1, "ppo.ppo_epochs": 2, "ppo.max_num_steps": 3, "cluster.num_nodes": 2}


def test_the_files_that_nemo_rl_builds_on_are_read(tmp_path):
    (tmp_path / "recipes").mkdir()
    write(tmp_path, "base.yaml", "ppo: {seed: 7, ppo_epochs: 2}\npolicy: {model_name: m, optimizer: {kwargs: {lr: 1.0}}}\n")
    write(tmp_path, "middle.yaml", "defaults: base.yaml\nppo: {ppo_epochs: 3}\npolicy: {optimizer: null}\n")
    write(
        tmp_path,
        "recipes/run.yaml",
        "defaults: ../middle.yaml\nppo: {max_num_steps: 5}\nvalue: {model_name: '${policy.model_name}'}\n",
    )
    source = read_source(tmp_path / "recipes" / "run.yaml")
    assert source.trainer.name == "NeMo-RL" and source.values == {
        "ppo.seed": 7,
        "ppo.ppo_epochs": 3,
        "ppo.max_num_steps": 5,
        "policy.model_name": "m",
        "policy.optimizer": None,
        "value.model_name": "m",
    }
    (tmp_path / "base.yaml").unlink()
    assert read_source(tmp_path / "recipes" / "run.yaml").values["defaults"] == "base.yaml", (
        "one that is not there is left, and counted"
    )
    write(tmp_path, "circle.yaml", "defaults: circle.yaml\nppo: {seed: 1, ppo_epochs: 2, max_num_steps: 3}\n")
    assert read_source(tmp_path / "circle.yaml").values["ppo.seed"] == 1


def test_references_of_a_yaml_file_are_resolved(tmp_path):
    text = """
policy:
  model_name: m
  max_total_sequence_length: 100
  train_micro_batch_size: 4
  tokenizer: {name: "${policy.model_name}"}
  sequence_packing: {train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"}
  generation: {temperature: 0.5, val_temperature: "${.temperature}", top_p: "${oc.select:nothing,0.9}", top_k: "${policy.absent}"}
value: {model_name: "${value.again}", again: "${value.model_name}"}
"""
    values = read_source(write(tmp_path, "run.yaml", text)).values
    assert values["policy.tokenizer.name"] == "m" and values["policy.sequence_packing.train_mb_tokens"] == 400
    assert values["policy.generation.val_temperature"] == 0.5
    assert values["policy.generation.top_p"] == "0.9" or values["policy.generation.top_p"] == 0.9
    assert values["policy.generation.top_k"] == Unread("${policy.absent}")
    assert isinstance(values["value.model_name"], Unread), "a circle ends"


def test_python_is_read_and_not_executed(tmp_path):
    text = "open('executed', 'w')\nLR = 1e-5\nkw = dict(kl_coef=0.1)\nc = trl.PPOConfig(learning_rate=LR, seed=f(), **kw)\n"
    source = read_source(write(tmp_path, "run.py", text))
    assert source.values == {"learning_rate": 1e-5, "seed": Unread("f()"), "kl_coef": 0.1}
    kwargs = read_source(write(tmp_path, "kw.py", "kwargs = {'num_ppo_epochs': 2, 'kl_coef': 0.1, 'sft_model_path': 'm'}"))
    assert kwargs.trainer.name == "TRL" and kwargs.values["num_ppo_epochs"] == 2


# name, content -> what the message says
BAD = [
    ("a.sh", "", "recognised: an empty file"),
    ("a.sh", "ls -l /tmp\necho done\n", "recognised: a shell script of 2 commands (ls -l /tmp ...)"),
    ("a.sh", "echo 'open\n", "not a shell script (no closing quotation), and not YAML or Python by its name"),
    ("a.yaml", "", "recognised: an empty YAML file"),
    ("a.yaml", "- 1\n", "recognised: YAML whose top is a list"),
    ("a.yaml", "services: {web: {image: x}}\nversion: 3\n", "recognised: YAML with the keys services, version"),
    ("a.yaml", "a: [1\n", "not valid YAML"),
    ("a.py", "x = 1\n", "recognised: Python without a call of PPOConfig"),
    ("a.py", "def f(:\n", "a.py:1: not Python"),
    ("a.py", "x = '\0'", "not Python"),
    ("a.sh", "\ud800".encode("utf-8", "surrogatepass"), "not UTF-8 text"),
    ("a.sh", "x" * ((1 << 20) + 1), "larger than 1048576 bytes"),
]


@pytest.mark.parametrize("name, content, says", BAD, ids=range(len(BAD)))
def test_a_file_that_is_none_of_these_is_one_line(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_source(path)
    assert says in str(caught.value) and str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_source(tmp_path / "absent.sh")
    with pytest.raises(ConfigError, match="is a directory"):
        read_source(tmp_path)
