"""Parcels: an object about a sample, from the rank that has it to the one that answers for the sample. Not for tokens.

One all-to-all of pickled bytes, so a rank gets what is for it and nothing else.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import TypeVar

import numpy
import torch

from megappo.trainer.experience.experience import Experience

Parcel = TypeVar("Parcel")


def to_owners(experience: Experience, parcels: Mapping[int, Parcel]) -> dict[int, Parcel]:
    """Parcels of this rank's samples, by number, from any ranks that had some. Collective over the wire of the experience.

    parcels: by number of the sample, small and picklable. A sample has one sender.
    """
    owners, ranks, places = experience.owners, experience.wire.ranks, experience.wire.places
    bags: list[dict[int, Parcel]] = [{} for _ in ranks]
    for number, parcel in parcels.items():
        bags[int(places[owners.shares.reporters[int(owners.share[number])]])][number] = parcel
    packed = [pickle.dumps(bag) if bag else b"" for bag in bags]
    sent = [len(one) for one in packed]
    sizes, ones = torch.empty(len(ranks), dtype=torch.long), [1] * len(ranks)
    experience.wire.all_to_all(sizes, torch.tensor(sent), ones, ones)
    received = sizes.tolist()
    arrived = torch.empty(sum(received), dtype=torch.uint8)
    # A copy: torch takes no memory that it may not write to.
    experience.wire.all_to_all(
        arrived, torch.from_numpy(numpy.frombuffer(bytearray(b"".join(packed)), numpy.uint8)), received, sent
    )
    found: dict[int, Parcel] = {}
    for one in arrived.split(received):
        if len(one):
            found |= pickle.loads(one.numpy().tobytes())
    return found
