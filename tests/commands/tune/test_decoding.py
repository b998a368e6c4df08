"""The simulation of a replica of vLLM: a full cache against a loop that draws token by token, an environment by hand."""

from __future__ import annotations

import math

import pytest

from megappo.commands.plan.memory import RolloutMemory
from megappo.commands.tune.decoding import Decoder, decoding
from megappo.commands.tune.lengths import Lengths, Turns
from megappo.commands.tune.work import Span
from megappo.models.arch import ModelArch, Rope
from megappo.telemetry.hardware import load_hardware

ARCH = ModelArch("llama", "LlamaForCausalLM", 16, 2048, 16, 8, 128, 5632, 32000, 8192, False, 1e-6, Rope())
H100, KEYS = load_hardware("h100"), 65536  # bytes of the keys and values of a token
PROMPT, SHARED = 64.0, 0.75


def replica(room):
    """A replica whose cache holds so many tokens."""
    return Decoder(ARCH, RolloutMemory(int(2e9), KEYS, int(room * KEYS)), Span(1, 1), "bf16", H100, False)


def token_by_token(lengths, places, room):
    """(Seconds of decoding, tokens that were computed again) by vLLM's rule, one token after the other."""
    decoder, waiting, present, seconds, again = replica(room), [(one, 0) for one in lengths], [], 0.0, []
    own, blocked = PROMPT * (1 - SHARED), False
    while waiting or present:
        while waiting and len(present) < places and not blocked:
            if present and sum(own + held for _, held in present) + own + waiting[0][1] >= room:
                break
            left, held = waiting.pop(0)
            again += [held] if held else []
            present.append((left, held))
        blocked = False
        while len(present) > 1 and sum(own + held + 1 for _, held in present) > room:
            waiting.insert(0, present.pop())
            blocked = True
        seconds += decoder.token(len(present), sum(PROMPT + held + 0.5 for _, held in present)).seconds
        grown = [(left - 1, held + 1) for left, held in present]
        present = [one for one in grown if one[0] > 0]
        blocked = blocked and len(present) == len(grown)
    prefill = sum(decoder.prefill_s(1, 1, PROMPT + held) - decoder.prefill_s(1, 1, PROMPT) for held in again)
    return seconds, prefill, len(again)


@pytest.mark.parametrize("room, least", [(3000, 50), (2500, 50), (1e9, 0)])
def test_a_full_cache_costs_what_vllm_throws_out_and_computes_again(room, least):
    lengths = [float(math.ceil(one)) for one in Lengths(200.0, 700.0, 1.0).of_replica(48, 2)]
    seconds, prefill, thrown_out = token_by_token(lengths, 32, room)
    found = decoding(lengths, 32, PROMPT, replica(room), SHARED)
    again = found.get("full cache", 0.0)
    assert thrown_out >= least and (thrown_out == 0) == (again == 0)
    assert sum(found.values()) - again == pytest.approx(seconds, rel=0.03)
    assert again == pytest.approx(prefill, rel=0.1)
    assert sum(found.values()) < 0.7 * sum(decoding(lengths, 1, PROMPT, replica(room), SHARED).values()), "they still share a batch"


def seconds_of(turns, count=32):
    return decoding([90.0] * count, 64, PROMPT, replica(1e9), turns=turns)


def test_an_environment_is_waited_for():
    """32 responses of 3 turns and answers of 0.1 s, as by `benchmarks/bench_environment.py`."""
    alone = sum(seconds_of(None).values())
    inline = seconds_of(Turns(3.0, 0.0, 0.1))
    assert inline["environment"] == pytest.approx(32 * 2 * 0.1) and sum(inline.values()) == pytest.approx(alone + 6.4)
    together = seconds_of(Turns(3.0, 0.0, 0.1, workers=8))
    assert together["environment"] == pytest.approx(2 * 32 / 8 * 0.1), "8 answers at a time, and nothing else goes on"
    assert sum(together.values()) == pytest.approx(alone + 0.8)
    many = seconds_of(Turns(3.0, 0.0, 0.1, workers=32))
    assert sum(many.values()) == pytest.approx(alone + 0.2)
    each = seconds_of(Turns(3.0, 0.0, 0.1, workers=8, together=False))
    assert sum(many.values()) < sum(each.values()) < 1.5 * sum(together.values())
    assert seconds_of(Turns(1.0, 0.0, 0.1)) == seconds_of(None), "one turn has no answer"


def test_observations_are_read_and_make_the_context_longer():
    plain, longer = (seconds_of(Turns(3.0, observed, 0.1, workers=8)) for observed in (0.0, 4000.0))
    decoder = replica(1e9)
    first, second = PROMPT + 30, PROMPT + 2060
    read = 32 * (
        decoder.prefill_s(1, 1, first + 2000)
        - decoder.prefill_s(1, 1, first)
        + decoder.prefill_s(1, 1, second + 2000)
        - decoder.prefill_s(1, 1, second)
    )
    assert longer["environment"] - plain["environment"] == pytest.approx(read, rel=0.01)
    busy = {key: value for key, value in longer.items() if key != "environment"}
    assert sum(busy.values()) > sum(value for key, value in plain.items() if key != "environment")


def test_an_answer_of_half_a_turn_more_is_half_an_answer_more():
    assert Turns(2.5, 100.0, 0.1).whole == 2 and Turns(2.5, 100.0, 0.1).answer_s == pytest.approx(0.15)
    assert Turns(1.2, 100.0, 0.1).observed_in_turn == 100.0
