"""GSM8K's rules: tables of what counts as the number 1,234, and agreement with all 8,792 gold answers."""

from __future__ import annotations

import re

import pytest

from megappo.rewards.gsm8k import gold_number, gsm8k_flexible, gsm8k_format, gsm8k_strict
from tests.gsm8k_files import gsm8k, needs_gsm8k
from tests.rewards.samples import sample

# response, gold, strict, flexible (last number anywhere), format
TABLE = [
    ("#### 72", "72", 1, 1, 1),
    ("Natalia sold 24.\n#### 72", "She sold <<48/2=24>>24.\n#### 72", 1, 1, 1),
    ("####72", "72", 1, 1, 1),
    ("#### 72.", "72", 1, 1, 1),
    ("#### 72.00", "72", 1, 1, 1),
    ("#### 072", "72", 1, 1, 1),
    ("#### 72", "72.0", 1, 1, 1),
    ("#### 72.5", "72", 0, 0, 1),
    ("#### .5", "0.5", 1, 1, 1),
    ("#### 1,234", "1234", 1, 1, 1),
    ("#### 1234", "1,234", 1, 1, 1),
    ("#### 1,234,567.50", "1234567.5", 1, 1, 1),
    ("#### 1,23", "123", 0, 0, 0),  # no thousands separator
    ("#### 12,345", "12", 0, 0, 1),
    ("#### $18", "18", 1, 1, 1),
    ("#### $ 18", "18", 1, 1, 1),
    ("#### 18$", "18", 1, 1, 1),
    ("#### 18 dollars per day", "18", 1, 1, 1),
    ("#### 18%", "18", 1, 1, 1),
    ("#### **18**", "18", 0, 1, 0),
    ("#### 18**", "18", 1, 1, 1),
    ("#### -5", "-5", 1, 1, 1),
    ("#### \u22125", "-5", 1, 1, 1),
    ("#### -$5", "-5", 1, 1, 1),
    ("#### $-5", "-5", 1, 1, 1),
    ("#### +5", "5", 1, 1, 1),
    ("#### 5", "-5", 0, 0, 1),
    ("#### -5", "5", 0, 0, 1),
    ("#### -0", "0", 1, 1, 1),
    ("#### 72-year-old", "72", 1, 1, 1),
    ("#### 3/4", "3", 0, 0, 0),
    ("#### 2^5", "2", 0, 0, 0),
    ("#### 36+36=72", "36", 0, 0, 0),
    ("#### 36 + 36", "36", 0, 1, 0),
    ("#### 5e3", "5", 0, 0, 0),
    ("#### 720", "72", 0, 0, 1),
    ("#### x = 72", "72", 0, 1, 0),
    ("####\n72", "72", 0, 1, 0),  # on the same line only
    ("### 72", "72", 0, 1, 0),
    ("#### 71\n#### 72", "72", 1, 1, 1),
    ("#### 72\n#### 71", "72", 0, 0, 1),
    ("#### 72\n#### done", "72", 1, 1, 1),  # the last one that has a number
    ("#### 72 and then 99", "72", 1, 0, 1),
    ("The answer is 72.", "72", 0, 1, 0),
    ("The answer is **72**.", "72", 0, 1, 0),
    ("so 12+60=72", "72", 0, 1, 0),
    ("from 16-5", "5", 0, 1, 0),  # a minus between operands is no sign
    ("it is -5", "-5", 0, 1, 0),
    ("it costs $1,234.50.", "1234.5", 0, 1, 0),
    ("...5", "5", 0, 1, 0),
    ("no number", "72", 0, 0, 0),
    ("", "72", 0, 0, 0),
    ("#### \u0667\u0662", "72", 0, 0, 0),  # ASCII digits only
]


def test_numbers_are_read_as_the_table_says() -> None:
    for response, gold, strict, flexible, has_format in TABLE:
        given = sample(response, gold)
        assert (gsm8k_strict(given), gsm8k_flexible(given), gsm8k_format(given)) == (strict, flexible, has_format)


@pytest.mark.parametrize("gold", ["", "seventy", "#### ", "1,23", "3/4", "72 apples", "72\n#### x"])
def test_a_gold_answer_that_is_no_number_is_an_error(gold: str) -> None:
    for rule in (gsm8k_strict, gsm8k_flexible):
        with pytest.raises(ValueError, match="the reference answer .* is not a number"):
            rule(sample("#### 72", gold))


def test_a_long_run_of_digits_is_read_in_linear_time() -> None:
    """A policy may repeat itself for thousands of tokens; quadratic matching would take minutes on these."""
    for text in ("7" * 200_000, "1,234," * 40_000, "#### " * 40_000, "-$" * 100_000):
        assert gsm8k_strict(sample(text, "72")) == gsm8k_flexible(sample(text, "72")) == 0


@needs_gsm8k
def test_all_gold_answers_agree_with_themselves_and_not_with_another_number() -> None:
    records = gsm8k("train", "test")
    assert len(records) == 8792
    for record in records:
        gold = record["answer"]
        changed = re.sub(r"[0-9](?=[^0-9]*$)", lambda m: str((int(m[0]) + 1) % 10), gold)
        assert changed != gold
        assert gsm8k_strict(sample(gold, gold)) == gsm8k_flexible(sample(gold, gold)) == 1.0, gold
        assert gsm8k_strict(sample(changed, gold)) == gsm8k_flexible(sample(changed, gold)) == 0.0, changed
        # An oracle without any pattern: int() of the text after the marker.
        assert gold_number(gold) == int(gold.split("####")[1].replace(",", ""))
