"""Order of the sequences of trajectories, against following one link after the other."""

import random

import pytest
import torch

from megappo.algo.chains import last_of_chains, order_of_chains


def links(count: int, seed: int) -> list[int]:
    """previous of `count` sequences that form chains of any lengths, in any order."""
    rng = random.Random(seed)
    left, previous = list(range(count)), [-1] * count
    rng.shuffle(left)
    while left:
        chain = [left.pop() for _ in range(min(len(left), rng.choice((1, 1, 2, 3, 7))))]
        for before, after in zip(chain, chain[1:]):
            previous[after] = before
    return previous


@pytest.mark.parametrize("count, seed", [(0, 0), (1, 0), (2, 1), (9, 2), (40, 3), (41, 4)])
def test_chains_are_those_of_the_links(count, seed):
    previous = links(count, seed)
    chains = []
    for end in range(count):
        if end not in previous:
            chain = [end]
            while previous[chain[0]] >= 0:
                chain.insert(0, previous[chain[0]])
            chains.append(chain)
    given = torch.tensor(previous, dtype=torch.int32)
    order, counts = order_of_chains(given)
    assert order.tolist() == [sample for chain in chains for sample in chain] and counts.tolist() == [
        len(chain) for chain in chains
    ]
    last = last_of_chains(given).tolist()
    assert all(last[sample] == chain[-1] for chain in chains for sample in chain)


@pytest.mark.parametrize("previous", [[-1, 0, 0], [1, 0], [0], [2, 0, 1, -1], [-1, 5]], ids=str)
def test_what_is_no_chain_is_refused(previous):
    with pytest.raises(ValueError, match="chains: "):
        order_of_chains(torch.tensor(previous))
