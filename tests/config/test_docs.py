"""The committed page is the one that the schema generates, and every key is documented."""

from pathlib import Path

import pytest

from megappo.config.keys import is_mapping, item_class, section_classes, sections, value_keys
from megappo.config.run_sections import RunConfig
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS
from scripts import reference_pages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page():
    return reference_pages.config_page()


def test_the_committed_page_is_current(page):
    assert (ROOT / "docs" / "config.md").read_text() == page, "run: python scripts/reference_pages.py"


def test_every_key_has_a_text_and_stands_on_the_page(page):
    for cls in (TrainConfig, *KINDS.values()):
        for key, field in value_keys(cls):
            assert field.description, key
            assert reference_pages.linked(field.description.replace("|", "\\|").replace("\n", " ")) in page, key
        for name, _ in sections(cls):
            assert f"### {name}\n" in page
        for _, field in value_keys(cls):
            if (items := item_class(field)) is not None:
                inner = {name for name, field in items.model_fields.items() if section_classes(field)}
                assert all(f"| `{name}` |" in page for name in items.model_fields.keys() - inner)
                item = ".NAME" if is_mapping(field) else "[]"
                assert all(f"{item}.{name}\n" in page for name in inner)


@pytest.mark.parametrize(
    "key, cells",
    [
        ("run.num_ranks", "| `num_ranks` | positive integer or **null** |"),
        ("run.device", "| `device` | **`auto`**, `cpu`, `cuda` |"),
        ("run.name", "| `name` | text `^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$`, **`run`** |"),
        ("policy.model", "| `model` | text, **required** |"),
        ("rollout.memory_share", "| `memory_share` | positive number < 1, **`0.4`** |"),
        ("rollout.sampling.replay_top_k_ids", "| `replay_top_k_ids` | **true**, false |"),
        ("trainer.eval_every", "| `eval_every` | integer >= 0, **`10`** |"),
        ("algorithm.loss.dual_clip", "| `dual_clip` | number > 1 or **null** |"),
        ("rollout.stop", "| `stop` | list of text, **`[]`** |"),
        ("reward.parts", '| `parts` | list of sections, **`[{"name": "exact_match", "weight": 1.0}]`** |'),
        ("algorithm.kl", "`placement` chooses among `reward`, `loss`, `none`; without it: `reward`."),
        ("algorithm.kl.controller.target", "| `target` | positive number, **`6.0`** |"),
    ],
)
def test_type_range_and_default_are_on_the_page(page, key, cells):
    assert cells in page


def test_a_changed_default_makes_the_page_stale(page, monkeypatch):
    """Negative control: the comparison sees a change of one default."""
    monkeypatch.setattr(RunConfig.model_fields["seed"], "default", 1)
    assert reference_pages.config_page() != page
