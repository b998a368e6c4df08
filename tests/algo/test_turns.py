"""Turns of random masks against a loop over tokens."""

import random

import torch

from megappo.algo.chains import over_turns, turn_starts

# Masks of the sequences of a batch: gaps, neighbours that are sampled to the end and from the start, none sampled, empty ones.
BATCHES = [[], [[]], [[0, 1, 1], [1, 0, 1], [], [0, 0], [1], []], [[], [0]]]
RANDOM = random.Random(3)
BATCHES += [[[int(RANDOM.random() < 0.6) for _ in range(RANDOM.randrange(9))] for _ in range(6)] for _ in range(20)]


def packed(masks):
    cu_seqlens = torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0)
    return torch.tensor([flag for mask in masks for flag in mask], dtype=torch.bool), cu_seqlens


def turns_of(masks):
    """Positions of each turn."""
    turns, start = [], 0
    for mask in masks:
        for place, flag in enumerate(mask):
            if flag and (place == 0 or not mask[place - 1]):
                turns.append([])
            if flag:
                turns[-1].append(start + place)
        start += len(mask)
    return turns


def test_turns_are_the_runs_of_sampled_tokens():
    for masks in BATCHES:
        mask, cu_seqlens = packed(masks)
        values = torch.randn(mask.numel(), generator=torch.Generator().manual_seed(0))
        starts, turns = turn_starts(mask, cu_seqlens), turns_of(masks)
        assert starts.nonzero().flatten().tolist() == [turn[0] for turn in turns]
        outside = torch.where(mask, values, torch.nan)
        want = [0.0] * mask.numel()
        for turn in turns:
            for t in turn:
                want[t] = float(values[turn[0]])
        assert over_turns(outside, mask, starts).tolist() == want


def test_a_turn_ends_with_its_sequence():
    """Negative control of the cases: without borders the neighbours of the third batch would be one turn."""
    mask, cu_seqlens = packed(BATCHES[2])
    assert turn_starts(mask, cu_seqlens[[0, -1]]).sum() < turn_starts(mask, cu_seqlens).sum()
