"""A policy of given versions on rank 0, and vLLM on the other ranks of a world, who say which version they want next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers

from megappo.bridge.sync import Route, WeightSync
from megappo.models.hf_config import read_arch
from megappo.parallel.layout import ParallelLayout
from megappo.rollout.subworld import prepare_rollout_world
from megappo.rollout.types import Response
from megappo.rollout.vllm_engine import VllmEngine
from tests.bridge.engines import HeldPolicy, policy_tensors, read_checkpoint
from tests.rollout.engines import make_engine

END = "end"


def weights_of(path: str, version: int) -> dict[str, torch.Tensor]:
    """The checkpoint, every tensor moved by `version` steps of a seeded direction."""
    tensors = read_checkpoint(path)
    for name, tensor in tensors.items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        tensor += 0.05 * version * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
    return tensors


class Held:
    """One rank of the world. Rank 0 serves pushes (`serve`) while an engine on the others asks for them."""

    def __init__(self, path: str) -> None:
        self.path, self.arch, self.ranks = path, read_arch(path), tuple(range(1, dist.get_world_size()))
        self.subworld = prepare_rollout_world(self.ranks)
        self.policy = HeldPolicy(self.arch, ParallelLayout(1))
        self._store: Any = dist.PrefixStore("held", dist.distributed_c10d._get_default_store())
        self._asked = 0

    def of(self, version: int) -> dict[str, torch.Tensor]:
        return policy_tensors(self.arch, ParallelLayout(1), 0, weights_of(self.path, version))

    def route(self, tp: int) -> Route:
        return Route(self.arch, self.policy.pieces(), (0,), self.ranks, tp)

    def connect(self, tp: int) -> WeightSync:
        """Rank 0's end of the bridge to an engine."""
        return WeightSync(self.policy, None, self.route(tp), torch.device("cpu"))

    def serve(self, sync: WeightSync) -> None:
        """Push as the engine asks, until it has had enough. On rank 0."""
        while (wanted := self._next()) != END:
            self.send(sync, int(wanted))

    def send(self, sync: WeightSync, version: int) -> None:
        self.policy.tensors = self.of(version)
        sync.push(version)

    def _next(self) -> str:
        self._store.wait([str(self._asked)], timedelta(seconds=200))
        self._asked += 1
        return self._store.get(str(self._asked - 1)).decode()

    def ask(self, wanted: int | str) -> None:
        if dist.get_rank() == 1:
            self._store.set(str(self._asked), str(wanted))
        self._asked += 1

    def push(self, engine: Any, version: int) -> None:
        self.ask(version)
        engine.push_weights(version)

    @contextlib.contextmanager
    def engine(self, tp: int, **changes: Any) -> Iterator[VllmEngine]:
        """An engine of an asynchronous run."""
        given = {"cache_after_push": "recompute", "subworld": self.subworld, **changes}
        with contextlib.closing(make_engine(self.path, tp, **given)) as engine:
            engine.connect(None, self.route(tp))
            yield engine


def parts_of(response: Response) -> list[tuple[list[int], list[float] | None, int]]:
    """(tokens, log-probs, version) of every segment."""
    return [(s.tokens.tolist(), None if s.logprobs is None else s.logprobs.tolist(), s.version) for s in response.segments]


def distances(path: str, prompts: dict[int, Sequence[int]], drawn: dict[int, list], temperature: float) -> list[float]:
    """Largest |recorded log-prob - that of transformers under the version of the token|, of first and of later segments."""
    worst = [0.0, 0.0]
    for version in {part[2] for parts in drawn.values() for part in parts}:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        model.load_state_dict(weights_of(path, version), strict=True)
        for number, parts in drawn.items():
            ids = list(prompts[number])
            for place, (tokens, logprobs, of) in enumerate(parts):
                if of == version and logprobs is not None:
                    with torch.no_grad():
                        logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].double() / temperature
                    own = logits.log_softmax(-1)[range(len(tokens)), tokens]
                    worst[place > 0] = max(worst[place > 0], float((own - torch.tensor(logprobs)).abs().max()))
                ids += tokens
    return worst
