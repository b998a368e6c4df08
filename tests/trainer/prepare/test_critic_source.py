"""`critic.checkpoint`: which checkpoint a path means, and what of it cannot initialise this critic.

Manifests are real; weights are not read.
"""

import shutil

import pytest

from megappo.checkpoint.identity import identity_of_model
from megappo.checkpoint.manifest import FileEntry, Manifest, write_manifest
from megappo.config.dump import dump_yaml
from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.trainer.prepare.checkpoint_source import CriticSource, critic_source
from megappo.trainer.prepare.layouts import read_archs
from tests.commands.plan.checkpoints import TINY, write_checkpoint, write_run


def write_step(run, step, config, roles=("policy", "critic"), **facts):
    """A checkpoint directory as a run with this configuration writes it, with one small file for each role."""
    place = run / "checkpoints" / f"step-{step}"
    names = [f"models/{role}/00000.safetensors" for role in roles]
    for name in names:
        (place / name).parent.mkdir(parents=True)
        (place / name).write_bytes(b"weights")
    files = {name: FileEntry(7, "0" * 64) for name in names}
    write_manifest(place, Manifest(step, 1, False, {"config": dump_yaml(config), **facts}, files))
    return place


@pytest.fixture
def other_run(tmp_path):
    """A run with checkpoints 5 and 10, made with the model of `write_run`."""
    config = load_config(write_run(tmp_path))
    for step in (5, 10):
        write_step(tmp_path / "other", step, config)
    return tmp_path / "other"


def source_of(folder, *overrides):
    config = load_config(folder / "run.yaml", overrides)
    return critic_source(config.critic, read_archs(config)["critic"], config.critic.model or config.policy.model)


def refusal(folder, *overrides):
    with pytest.raises(ConfigError) as error:
        source_of(folder, *overrides)
    assert "\n" not in str(error.value) and str(error.value).startswith("critic.checkpoint = ")
    return str(error.value)


def test_a_run_means_its_newest_checkpoint_and_a_step_itself(tmp_path, other_run):
    checkpoints = other_run / "checkpoints"
    assert source_of(tmp_path) is None
    assert source_of(tmp_path, f"critic.checkpoint={other_run}") == CriticSource(checkpoints, 10, "critic")
    assert source_of(tmp_path, f"critic.checkpoint={checkpoints / 'step-5'}") == CriticSource(checkpoints, 5, "critic")
    policy = source_of(tmp_path, f"critic.checkpoint={other_run}", "critic.checkpoint_role=policy")
    assert policy == CriticSource(checkpoints, 10, "policy")


def test_an_incomplete_newest_checkpoint_is_passed_over_and_refused_by_name(tmp_path, other_run):
    newest = other_run / "checkpoints" / "step-10"
    (newest / "models" / "critic" / "00000.safetensors").write_bytes(b"torn")
    assert source_of(tmp_path, f"critic.checkpoint={other_run}").step == 5
    text = refusal(tmp_path, f"critic.checkpoint={newest}")
    assert "damaged or incomplete" in text and "4 bytes instead of 7" in text and "use another step" in text


def test_a_newest_checkpoint_that_cannot_be_read_is_not_passed_over(tmp_path, other_run):
    """It may be whole: the older one would be another critic."""
    manifest = other_run / "checkpoints" / "step-10" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    assert "manifest.json: Is a directory; nothing was renamed" in refusal(tmp_path, f"critic.checkpoint={other_run}")


def test_what_is_no_checkpoint_is_refused_with_what_would_be_one(tmp_path, other_run):
    assert "is not a directory; name a run directory (runs/NAME)" in refusal(tmp_path, "critic.checkpoint=absent")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no complete checkpoint" in refusal(tmp_path, f"critic.checkpoint={empty}")
    assert "set critic.model to it instead" in refusal(tmp_path, f"critic.checkpoint={tmp_path / 'model'}")
    renamed = shutil.move(other_run / "checkpoints" / "step-5", other_run / "checkpoints" / "step-6")
    assert "its manifest is that of step 5" in refusal(tmp_path, f"critic.checkpoint={renamed}")


def test_a_role_that_the_checkpoint_lacks_is_named(tmp_path, other_run):
    write_step(other_run, 20, load_config(tmp_path / "run.yaml"), roles=("policy",))
    text = refusal(tmp_path, f"critic.checkpoint={other_run}")
    assert "step-20 holds no critic (it has: policy); set critic.checkpoint_role" in text
    assert source_of(tmp_path, f"critic.checkpoint={other_run}", "critic.checkpoint_role=policy").step == 20


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path, other_run):
    larger = write_checkpoint(tmp_path / "larger", TINY | {"num_hidden_layers": 8}, tokenizer=False)
    text = refusal(tmp_path, f"critic.checkpoint={other_run}", f"critic.model={larger}")
    assert "num_layers 4 instead of 8" in text and f"set critic.model to {tmp_path / 'model'}" in text
    # Of the same body with a head of its own, as reward models are.
    reward = TINY | {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": True}
    headed = write_checkpoint(tmp_path / "reward", reward, tokenizer=False)
    assert source_of(tmp_path, f"critic.checkpoint={other_run}", f"critic.model={headed}").step == 10


def test_a_checkpoint_with_another_value_head_is_refused(tmp_path):
    """Its outputs mean something else; a head that gives the value itself is the same under both of its losses."""
    bins = ["critic.loss=hl_gauss", "critic.loss.low=0", "critic.loss.high=1"]
    config = load_config(write_run(tmp_path), bins)
    write_step(tmp_path / "other", 1, config, value_head=config.critic.head_facts)
    write_step(tmp_path / "scalar", 1, config)
    binned, scalar = (f"critic.checkpoint={tmp_path / name}" for name in ("other", "scalar"))
    assert source_of(tmp_path, binned, *bins).role == "critic"
    assert 'written with critic.loss.type = "hl_gauss", this run has "mse or huber"' in refusal(
        tmp_path, binned, "critic.loss=huber"
    )
    assert 'critic.loss.type = "hl_gauss", this run has "two_hot"' in refusal(tmp_path, binned, *bins, "critic.loss.type=two_hot")
    assert "critic.loss.bins = 51, this run has 5" in refusal(tmp_path, binned, *bins, "critic.loss.bins=5")
    assert "critic.loss.high = 1.0, this run has 2.0" in refusal(tmp_path, binned, *bins, "critic.loss.high=2")
    assert 'critic.loss.type = "mse or huber", this run has "hl_gauss"' in refusal(tmp_path, scalar, *bins)
    assert source_of(tmp_path, scalar, "critic.loss=huber").role == "critic"
    assert source_of(tmp_path, scalar, *bins, "critic.checkpoint_role=policy").role == "policy"


def test_the_critics_own_model_of_the_other_run_is_what_counts(tmp_path):
    larger = write_checkpoint(tmp_path / "larger", TINY | {"num_hidden_layers": 8}, tokenizer=False)
    other = load_config(write_run(tmp_path), [f"critic.model={larger}"])
    write_step(tmp_path / "other", 1, other)
    source = f"critic.checkpoint={tmp_path / 'other'}"
    assert "num_layers 8 instead of 4" in refusal(tmp_path, source)
    assert source_of(tmp_path, source, f"critic.model={larger}").role == "critic"
    assert source_of(tmp_path, source, "critic.checkpoint_role=policy").role == "policy"


def test_a_model_that_has_moved_is_left_to_the_load(tmp_path, other_run):
    """The shapes are compared then; the checkpoint alone does not say what they are."""
    moved = shutil.move(tmp_path / "model", tmp_path / "moved")
    overrides = [f"policy.model={moved}", f"critic.checkpoint={other_run}"]
    assert source_of(tmp_path, *overrides).step == 10


def test_a_critic_with_adapters_starts_from_the_same_adapters_on_the_same_model(tmp_path, other_run):
    lora, there = ["critic.lora.rank=4", "critic.lora.alpha=8"], f"critic.checkpoint={other_run}"
    assert "its critic trained all weights, and critic.lora is set: remove it" in refusal(tmp_path, there, *lora)
    config = load_config(tmp_path / "run.yaml", lora)
    base = identity_of_model(tmp_path / "model")
    write_step(other_run, 20, config, lora={"critic": {"base": base, **config.critic.lora.model_dump(mode="json")}})
    assert source_of(tmp_path, there, *lora).step == 20
    assert source_of(tmp_path, there, *lora, "critic.lora.dropout=0.1").step == 20, "dropout is of the training"
    assert "its critic trained adapters, and critic.lora is null: set it" in refusal(tmp_path, there)
    assert "critic.lora.base_bits = null, this run has 8" in refusal(tmp_path, there, *lora, "critic.lora.base_bits=8")
    assert "critic.lora.rank = 4, this run has 3" in refusal(tmp_path, there, *lora, "critic.lora.rank=3")
    other = write_checkpoint(tmp_path / "other_model", TINY | {"rope_theta": 5.0}, tokenizer=False)
    text = refusal(tmp_path, there, *lora, f"critic.model={other}")
    assert f"critic.lora on the model = {tmp_path / 'model'} (SHA-256 " in text and f", this run has {other} (SHA-256 " in text
