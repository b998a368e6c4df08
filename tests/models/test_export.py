"""Import into any layout and export again gives back the checkpoint bit for bit, and transformers computes the same with it."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megappo.models.hf_config import read_arch
from megappo.models.hf_export import Written, export_config
from tests.models.cases import EXPORT_LAYOUTS
from tests.models.checkpoints import CASES, COMPOSITE, example_sequences, reference_logits


def language_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype="auto")


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def folder(checkpoints, four_ranks):
    return checkpoints


@pytest.mark.parametrize("case", CASES)
def test_export_of_an_import_is_bit_equal(folder, case):
    outs = sorted(folder.glob(f"{case}.out?"))
    assert outs
    for out in outs:
        before, after = tensors_of(folder / case), tensors_of(out)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_the_export(folder, case):
    exported = language_model(folder / f"{case}.out2")
    original = language_model(folder / case)
    # Equal weights at other file offsets are aligned differently in memory, which changes the last bit of a CPU product.
    torch.testing.assert_close(reference_logits(exported), reference_logits(original), rtol=0, atol=1e-5)


def test_a_composite_checkpoint_is_exported_as_its_language_model(folder):
    exported = language_model(folder / f"{COMPOSITE}.out2")
    assert type(exported).__name__ == "Ministral3ForCausalLM"
    torch.testing.assert_close(reference_logits(exported), torch.load(folder / f"{COMPOSITE}.pt"), rtol=0, atol=1e-5)
    # Where vLLM looks for what transformers calls rope_parameters.llama_4_scaling_beta.
    assert exported.config.llama_4_scaling == {"original_max_position_embeddings": 16, "beta": 0.1}


@pytest.mark.parametrize(
    "keys", [{}, {"dtype": "float32"}, {"torch_dtype": "float16"}, {"dtype": "float32", "torch_dtype": "float16"}]
)
def test_every_dtype_key_of_the_configuration_is_the_exports(folder, keys):
    config = json.loads((folder / "llama" / "config.json").read_text())
    source = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")} | keys
    written = export_config(Written(read_arch(folder / "llama"), torch.bfloat16, value_head=False), source)
    found = {key: written[key] for key in ("dtype", "torch_dtype") if key in written}
    assert found == dict.fromkeys(keys or ["dtype"], "bfloat16")


def test_export_copies_the_tokenizer_and_no_code(folder):
    out = folder / "llama.out2"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "</s>"}
    assert (out / "generation_config.json").is_file()
    assert not list(out.glob("*.py")) and not list(folder.glob("*.out?.partial"))


def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_no_export(folder, four_ranks):
    for existing, blocked in (rank["refused"] for rank in four_ranks):
        assert existing == ("ValueError", f"{folder / 'llama'} exists; export to another directory or remove it")
        assert blocked[0] == "OSError" and "export on rank 2" in blocked[1]  # tp rank 0 of the last stage
    assert not (folder / "blocked").exists() and (folder / "llama" / "config.json").is_file()


def test_small_shards_have_a_complete_index(folder):
    out = folder / "llama.out0"
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    assert {name: file for file in {*index.values()} for name in load_file(out / file)} == index


@pytest.mark.parametrize("number", range(len(EXPORT_LAYOUTS)))
def test_a_critic_becomes_a_token_classifier_with_the_head_of_the_reward_model(folder, number):
    classifier = transformers.AutoModelForTokenClassification.from_pretrained(folder / f"reward.out{number}", dtype="auto").eval()
    reward = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype="auto").eval()
    assert type(classifier).__name__ == "Qwen2ForTokenClassification" and classifier.num_labels == 1
    for tokens in example_sequences()[:3]:
        with torch.no_grad():
            values, score = classifier(input_ids=tokens[None]).logits[0, :, 0], reward(input_ids=tokens[None]).logits[0, 0]
        torch.testing.assert_close(values[-1], score, rtol=0, atol=1e-5)


def test_a_normal_value_head_is_the_same_in_every_layout_and_has_the_stated_variance(folder):
    heads = [tensors_of(folder / f"normal.out{i}")["score.weight"] for i in range(len(EXPORT_LAYOUTS))]
    assert all(torch.equal(heads[0], head) for head in heads[1:])
    # 64 draws: the mean square has relative standard deviation sqrt(2 / 64)
    assert abs(heads[0].square().mean().item() * 65 - 1) < 4 * (2 / 64) ** 0.5
