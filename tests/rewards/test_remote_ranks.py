"""A server that is wrong to one rank fails all of them, together and with the same message; one that is down fails none."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.rewards.faulty_server import FaultyServer, Handler, fine, serving
from tests.worlds import spawn_world

BUDGET_S = 2.0
TOGETHER_S = 20.0  # 5 by RELIABILITY.md F16, of ranks that wait for no other process of the machine


def answer_by_answer(handler: Handler) -> None:
    """A sample whose reference answer says so is answered with 500, with NaN, or after 60 s; the others well."""
    asked = {sample["answer"] for sample in handler.asked["samples"]}
    if "500" in asked:
        handler.answer(500, b"out of memory")
    elif "NaN" in asked:
        handler.answer(200, b'{"scores": [' + b", ".join([b"NaN"] * len(handler.asked["samples"])) + b"]}")
    elif "slow" in asked:
        time.sleep(60)
    else:
        fine(handler)


class Server(FaultyServer):
    def take(self, handler: Handler) -> Any:
        super().take(handler)
        return answer_by_answer


def scored(rank: int, url: str, answers: list[str]) -> tuple[str, float, float]:
    """Score a response for each answer: (error or scores, seconds of it, moment of its end)."""
    from megappo.config.reward_sections import RemoteConfig, RewardConfig, RewardPart
    from megappo.data.prompts import Prompt
    from megappo.rewards.base import RewardError
    from megappo.trainer.prepare.reward_parts import load_parts
    from megappo.trainer.sampling import scorer_of
    from tests.rollout.responses import answered
    from tests.trainer.experiences import score
    from tests.trainer.test_advantages_and_updates import LETTERS

    remote = RemoteConfig(batch_size=1, retry_budget_s=BUDGET_S, timeout_s=60.0)
    reward = RewardConfig(parts=(RewardPart(name="rm", url=url, remote=remote),))
    scorer = scorer_of(reward, load_parts(reward))
    prompts = [Prompt(f"f#{i}", (1,), "q", answer, {}) for i, answer in enumerate(answers)]
    responses = [answered((2,) * (1 + i % 3)) for i in range(len(answers))]
    start = time.monotonic()
    try:
        result = json.dumps(score(prompts, responses, LETTERS, scorer).total)
    except RewardError as error:
        result = str(error)
    end = time.monotonic()
    scorer.close()
    return result, end - start, end


def cases(rank: int, url: str) -> list[tuple[str, float, float]]:
    """Fine; a server down for one rank's budget; one rank fails at once, and at once while the other is still waiting."""
    return [scored(rank, url, answers) for answers in (["", "", "", ""], ["", "500"], ["NaN", ""], ["slow", "NaN"])]


def test_all_ranks_fail_together_with_one_message() -> None:
    with serving(make=Server) as server:
        ranks = spawn_world(cases, 2, server.url)
    assert [json.loads(cases[0][0]) for cases in ranks] == [[1.0, 3.0], [2.0, 1.0]], "each rank's share, in order"
    assert ranks[0][1][0] == "[1.0]" and ranks[1][1][0] == "[NaN]", "no verdict on the sample that it fails, and no more"
    assert BUDGET_S <= ranks[1][1][1] < BUDGET_S + TOGETHER_S
    for mine, other in zip(*(cases[2:] for cases in ranks)):
        assert mine[0] == other[0] and abs(mine[2] - other[2]) < TOGETHER_S
    (wrong, wrong_s), (both, both_s) = ((mine[0], max(mine[1], other[1])) for mine, other in zip(*(cases[2:] for cases in ranks)))
    assert wrong.startswith(f"rank 0: reward rm: {server.url}: the answer holds NaN") and wrong_s < TOGETHER_S
    assert both.startswith(f"rank 1: reward rm: {server.url}: the answer holds NaN") and both_s < TOGETHER_S
