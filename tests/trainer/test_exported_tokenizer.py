"""Exports carry the tokenizer that the run read, `data.tokenizer`, whatever lies beside the model's weights. Ids that end a
response are those of the tokenizer and of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from megappo.commands.export.export import export_checkpoint
from megappo.commands.generate.answer import Texts, answer
from megappo.config.loading import load_config
from megappo.config.supervised import SftConfig
from megappo.data.tokenizers import Tokenizer, load_tokenizer
from megappo.parallel.device import start_alone
from megappo.trainer.main import train
from megappo.trainer.prepare.run import prepare_run
from scripts.arithmetic import train_tokenizer
from tests.data.tokenizer_files import write_hf_tokenizer
from tests.trainer.small_run import run_many, set_keys, small_config, write_small_task
from tests.worlds import spawn_world

VOCABULARY, ENDS = 288, 20
OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}={% endif %}"
ONE_RANK: dict[str, Any] = {"run.num_ranks": 1, "policy.parallel": {}, "rollout.engine": "megatron", "trainer.eval_every": 1}
PLAIN = {"algorithm.estimator": "rloo", "algorithm.kl": {"placement": "none"}, "telemetry": {"trajectories_every": 0}}


def write_task(folder: Path) -> None:
    """Model with its own tokenizer and generation settings (`model`), the same without any (`weights`), a Hugging Face tokenizer of
    another template and eos (`other`) and a SentencePiece one under another name (`sums.model`)."""
    write_small_task(folder)
    config = transformers.LlamaConfig.from_pretrained(folder / "model", vocab_size=VOCABULARY)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "weights")
    (folder / "weights" / "generation_config.json").unlink()
    shutil.rmtree(folder / "model")
    shutil.copytree(folder / "weights", folder / "model")
    write_hf_tokenizer(folder / "model", vocab_size=VOCABULARY)
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [4, 2], "temperature": 0.5, "do_sample": true}')
    write_hf_tokenizer(folder / "other", vocab_size=VOCABULARY, eos_token="<|im_start|>", chat_template=OTHER_TEMPLATE)
    (folder / "other" / "generation_config.json").unlink()
    shutil.copyfile(train_tokenizer(folder / "sp"), folder / "sums.model")
    shutil.copytree(folder / "weights", folder / "ends")
    ends = json.loads((folder / "ends" / "config.json").read_text()) | {"eos_token_id": [*range(ENDS, VOCABULARY)]}
    (folder / "ends" / "config.json").write_text(json.dumps(ends))


def ppo_config(folder: Path, name: str, model: str, tokenizer: str | None, **changes: Any) -> dict[str, Any]:
    config = small_config(folder, name, steps=2)
    del config["critic"], config["reference"], config["algorithm"]["bootstrap_truncated"]
    keys = {"policy.model": str(folder / model), "data.tokenizer": tokenizer and str(folder / tokenizer)}
    checkpoint = {"checkpoint": {"save_every": 1, "keep_last": 2, "export_at_end": True}}
    return set_keys(config, {**ONE_RANK, **PLAIN, **checkpoint, **keys, "data.max_prompt_tokens": 40, **changes})


def sft(folder: Path) -> None:
    """Fine-tune the weights alone with the tokenizer `other`; leaves the world."""
    config = {
        "run": {"name": "sft", "output_dir": str(folder / "runs"), "num_ranks": 1, "device": "cpu"},
        "policy": {"model": str(folder / "weights"), "dtype": "fp32"},
        "data": {"train": str(folder / "data" / "sft.jsonl"), "tokenizer": str(folder / "other"), "max_tokens": 60},
        "trainer": {"steps": 1, "batch_size": 4},
    }
    path = folder / "sft.yaml"
    path.write_text(yaml.safe_dump(config))
    loaded = load_config(str(path), [], SftConfig)
    train(loaded, prepare_run(loaded, 1, "cpu").data, resume=False)
    torch.distributed.destroy_process_group()


def export(folder: Path, run: str, name: str, **which: Any) -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # it makes its own
    export_checkpoint(str(folder / "runs" / run), str(folder / name), **{"role": "policy", "step": None, **which})


def run_all(rank: int, folder: Path) -> list[str]:
    """Return answers of `megappo generate`."""
    chat, averaged = {"data.chat_template": True}, {"policy.ema": {"decay": 0.5}}
    best = {"trainer.keep_best": "eval/score"}
    run_many(rank, [(ppo_config(folder, "chat", "model", "other", **chat, **averaged, **best), False)])
    run_many(rank, [(ppo_config(folder, "sums", "model", "sums.model", **{"policy.lora": {"rank": 2, "alpha": 4}}), False)])
    run_many(rank, [(ppo_config(folder, "ends", "ends", "sums.model"), False)])
    run_many(rank, [(ppo_config(folder, "own", "model", None, **chat), False)])
    export(folder, "chat", "newest")
    export(folder, "chat", "best", step="best")
    export(folder, "chat", "ema", role="ema")
    start_alone(torch.device("cpu"))
    sft(folder)
    start_alone(torch.device("cpu"))
    run_many(rank, [(ppo_config(folder, "warm", "runs/sft/export", None, **chat), False)])
    torch.distributed.destroy_process_group()
    how: dict[str, Any] = dict(engine="megatron", max_tokens=4, temperature=1.0, dtype="fp32")
    said = answer(str(folder / "ends"), ["1+2="] * 8, Texts(False, str(folder / "sums.model")), **how)
    start_alone(torch.device("cpu"))  # which the test's world leaves
    return said


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("runs")
    write_task(folder)
    return folder, spawn_world(run_all, 1, folder)[0]


@pytest.fixture(scope="module")
def folder(world: tuple[Path, list[str]]) -> Path:
    return world[0]


def same(exported: Path, trained: Tokenizer) -> bool:
    """True if both tokenizers turn texts to the same ids and back, by the same template, and end a response alike."""
    one = load_tokenizer(exported)
    chats = [[{"role": "user", "content": "1+2="}]] if trained.has_chat_template else []
    assert one.has_chat_template == trained.has_chat_template and [*map(one.chat, chats)] == [*map(trained.chat, chats)]
    assert one.pieces() == trained.pieces() and one.encode_prompt("1+2=3") == trained.encode_prompt("1+2=3")
    return (one.eos_id, set(one.eos_ids)) == (trained.eos_id, set(trained.eos_ids))


@pytest.mark.parametrize("name", ["runs/chat/export", "newest", "best", "ema", "runs/sft/export", "runs/warm/export"])
def test_the_export_has_the_tokenizer_of_the_run_with_its_template_and_eos(folder: Path, name: str) -> None:
    model = "weights" if "runs/sft" in name or "warm" in name else "model"
    assert same(folder / name, load_tokenizer(folder / "other", folder / model))
    library = transformers.AutoTokenizer.from_pretrained(folder / name)
    assert (library.chat_template, library.eos_token) == (OTHER_TEMPLATE, "<|im_start|>")


def test_a_sentencepiece_tokenizer_replaces_that_of_the_model(folder: Path) -> None:
    export = folder / "runs" / "sums" / "export"
    for place, model in ((export, folder / "model"), (export / "adapter", None)):
        assert same(place, load_tokenizer(folder / "sums.model", model))
        assert not (place / "tokenizer.json").exists(), "which would be read first"


def test_a_response_ends_at_an_id_of_the_models_configuration(world: tuple[Path, list[str]]) -> None:
    """Nearly all ids of the model end one: in a run's samples, in its evaluation, in `megappo generate`, and after an export."""
    folder, said = world
    rows = [json.loads(line) for line in (folder / "runs" / "ends" / "metrics.jsonl").read_text().splitlines()]
    lengths = [row[key] for row in rows for key in ("lengths/response_mean", "eval/length") if key in row]
    cut = [row[key] for row in rows for key in ("lengths/truncated", "eval/truncated") if key in row]
    assert len(lengths) == len(cut) >= 4 and max(lengths) < 1.5 and max(cut) == 0.0, "six tokens fit"
    assert max(map(len, said)) <= 2 and said.count("") > 4, "of four tokens"
    assert set(load_tokenizer(folder / "runs" / "ends" / "export").eos_ids) == {2, *range(ENDS, VOCABULARY)}


def test_generation_settings_are_the_models_and_end_where_the_run_ended_responses(folder: Path) -> None:
    def settings(name: str) -> dict[str, Any]:
        return json.loads((folder / name / "generation_config.json").read_text())

    model = settings("model")
    assert settings("runs/own/export") == model, "the model's own tokenizer ends responses there already"
    found = settings("runs/chat/export")
    assert set(found.pop("eos_token_id")) == {3, 4, 2}, "of the tokenizer, and of the model's settings"
    assert found == {key: value for key, value in model.items() if key != "eos_token_id"}
    assert settings("runs/sft/export") == {"eos_token_id": [3, 2]}
