"""Exchanges of small integers between the ranks of a weight transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megappo.parallel.consensus import gathered


class Wire:
    """The ranks of a transfer and what they agree on. Methods are collective over the group (None: the world), of which a rank may
    be at neither end. device: of tensors that its backend carries."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.group = device, group
        self.rank = dist.get_rank()
        self.peers: list[int] = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        """World ranks of the group, in its order."""

    def reduce(self, values: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        """Reduce int64 values elementwise over all ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=op, group=self.group)
        return tensor.tolist()

    def swap(self, values: Mapping[int, int]) -> dict[int, int]:
        """Send values[peer], 64-bit unsigned, to every peer (0 if there is none); return what they sent here."""
        unsigned = (values.get(peer, 0) for peer in self.peers)
        mine = [value - (1 << 64) if value >> 63 else value for value in unsigned]
        sent = torch.tensor(mine, dtype=torch.int64, device=self.device)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        return {peer: value % (1 << 64) for peer, value in zip(self.peers, received.tolist())}

    def gather_lines(self, lines: Sequence[str]) -> list[str]:
        """Gather the lines of all ranks, so that every rank raises or none. Costs one integer if there are none."""
        if not self.reduce([len(lines)], dist.ReduceOp.SUM)[0]:
            return []
        return [line for part in gathered(list(lines), self.group) for line in part]
