"""Seconds that a replica of vLLM takes to decode the responses of a step, by a simulation of its batches.

A place is filled as soon as a response ends. If the cache is full, the request that came last is thrown out, waits before all
others, and its tokens are computed again once there is room (vLLM's preemption by recomputation). Under an environment a response
is drawn in turns, and between them it leaves its place until the answer is there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from megappo.commands.plan.activations import ITEMSIZE
from megappo.commands.plan.memory import RolloutMemory
from megappo.commands.tune.lengths import Turns
from megappo.commands.tune.work import Links, Span
from megappo.models.arch import ModelArch
from megappo.models.flops import MULTIPLY_ADD, attention_products, layer_weights
from megappo.telemetry.hardware import Dtype, Hardware

Limit = Literal["memory", "compute", "links", "host", "longest response", "full cache", "environment"]
TAIL = 0.5  # of the places: below, a replica is called to wait for its longest responses
INSTANT = 1e-9  # sums of seconds and of tokens are rounded


class Token(NamedTuple):
    """Seconds of a token of every sequence of a batch, by cause."""

    memory: float
    compute: float
    links: float
    host: float
    overlaps: bool
    """True if the host works beside the GPU."""

    @property
    def seconds(self) -> float:
        device = max(self.memory, self.compute) + self.links
        return max(device, self.host) if self.overlaps else device + self.host

    @property
    def limit(self) -> Limit:
        causes: dict[Limit, float] = {"memory": self.memory, "compute": self.compute, "links": self.links, "host": self.host}
        return max(causes, key=lambda cause: causes[cause])


@dataclass(frozen=True)
class Decoder:
    """A replica of vLLM as the model of its tokens sees it. Sizes are of one rank, rates of one GPU."""

    arch: ModelArch
    memory: RolloutMemory
    group: Span
    dtype: Dtype
    hardware: Hardware
    overlaps: bool

    @cached_property
    def flops_per_token(self) -> tuple[float, float]:
        """FLOPs of a token in (the layers, the head)."""
        arch = self.arch
        weights = sum(sum(layer_weights(arch, arch.kind(layer))) for layer in range(arch.num_layers))
        return MULTIPLY_ADD * weights / self.group.size, MULTIPLY_ADD * arch.hidden_size * arch.vocab_size / self.group.size

    @cached_property
    def _weights(self) -> tuple[float, float]:
        """Bytes of the weights that (every token, the chosen experts) read, were all experts chosen."""
        arch = self.arch
        always = chosen = 0.0
        for layer in range(arch.num_layers):
            kind = arch.kind(layer)
            attention, mlp = layer_weights(arch, kind)
            always += attention + (0 if kind.sparse else mlp)
            if arch.moe is not None and kind.sparse:
                chosen += mlp * arch.moe.num_experts / arch.moe.top_k
        share = chosen / (always + chosen)
        return self.memory.weights * (1 - share), self.memory.weights * share

    @cached_property
    def _rates(self) -> tuple[float, float]:
        return self.hardware.memory_bytes_per_s, self.hardware.flops_per_s(self.dtype)

    def reduce_s(self, tokens: float) -> float:
        """Seconds of the all-reduces of all layers: two in each, after attention and after the MLP."""
        size, group, links = tokens * self.arch.hidden_size * ITEMSIZE[self.dtype], self.group, self._links
        if group.size == 1:
            return 0.0
        if group.crosses_nodes or not self.hardware.is_gpu():
            return 2 * self.arch.num_layers * links.all_reduce_s(group, size)
        wire = 2 * size * (group.size - 1) / group.size / links.node_bytes_per_s
        return 2 * self.arch.num_layers * (self.hardware.small_all_reduce_us * 1e-6 + wire)

    @cached_property
    def _links(self) -> Links:
        return Links.of(self.hardware)

    def token(self, batch: int, context: float) -> Token:
        """A token of each of `batch` sequences. context: tokens that all of them have in the cache."""
        (always, experts), (bytes_per_s, flops_per_s) = self._weights, self._rates
        if self.arch.moe is not None:
            # Expected share of E experts that a batch of B tokens reaches, with k experts per token: 1 - (1 - k / E) ** B.
            experts *= 1 - (1 - self.arch.moe.top_k / self.arch.moe.num_experts) ** batch
        read = always + experts + context * self.memory.kv_bytes_per_token
        arithmetic = batch * sum(self.flops_per_token) / flops_per_s
        host = (self.hardware.decode_overhead_us + batch * self.hardware.sequence_overhead_us) * 1e-6
        return Token(read / bytes_per_s, arithmetic, self.reduce_s(batch), host, self.overlaps)

    def prefill_s(self, prompts: float, samples: float, length: float) -> float:
        """Seconds of so many prompts of this length. Only the last token of a sample's prompt needs logits."""
        arch, tokens = self.arch, prompts * length
        layers, head = self.flops_per_token
        products = sum(attention_products(arch, layer, length) for layer in range(arch.num_layers))
        attention = MULTIPLY_ADD * products / self.group.size
        size = tokens * arch.hidden_size * ITEMSIZE[self.dtype]
        reduce_s = 2 * arch.num_layers * self._links.all_reduce_s(self.group, size)
        return (tokens * (layers + attention) + samples * head) / self._rates[1] + reduce_s


class Request(NamedTuple):
    """A response, or what is left of it."""

    left: float
    """Tokens to draw."""
    turns: int
    """Turns that they take."""
    held: float = 0.0
    """Tokens after the prompt that it has already."""
    computed: float = 0.0
    """Of `held`, those whose keys and values are in the cache."""


class _Replica:
    """State of a simulation. Tokens of a sequence are counted from the start: one that is there at `drawn` and began at `begun` has
    drawn `drawn - begun`."""

    def __init__(self, decoder: Decoder, prompt: float, shared: float, turns: Turns | None) -> None:
        self.decoder, self.prompt, self.turns = decoder, prompt, turns
        cache, per_token = decoder.memory.kv_cache, decoder.memory.kv_bytes_per_token
        self.room = math.inf if cache is None else cache / per_token
        self.own = prompt * (1 - shared)  # of a prompt in the cache; the rest is that of another response
        self.drawn = self.now = 0.0
        self.spent: dict[Limit, float] = {}
        self.ends: list[tuple[float, int]] = []  # (`drawn` at the end of the turn, number) of those present
        self.present: dict[int, tuple[Request, float]] = {}  # number, in the order of arrival -> (request, `drawn` when it came)
        self.offset = 0.0  # sum over those present of `drawn` when they came less what they held
        self.away: list[tuple[float, int, Request]] = []  # under the environment: (seconds of the answer, number, request)
        self.workers = [0.0] * (0 if turns is None else max(1, turns.workers))  # when each is free
        self.number = 0

    @property
    def used(self) -> float:
        """Tokens in the cache."""
        return len(self.present) * (self.own + self.drawn) - self.offset

    def spend(self, seconds: float, limit: Limit) -> None:
        self.now += seconds
        self.spent[limit] = self.spent.get(limit, 0.0) + seconds

    def admits(self, request: Request) -> bool:
        return not self.present or self.used + self.own + request.held < self.room

    def admit(self, request: Request) -> None:
        if request.computed < request.held:  # keys and values of tokens that were thrown out, or that the environment wrote
            length, known = self.prompt + request.held, self.prompt + request.computed
            again: Limit = "environment" if request.computed else "full cache"
            self.spend(self.decoder.prefill_s(1, 1, length) - self.decoder.prefill_s(1, 1, known), again)
        heappush(self.ends, (self.drawn + request.left / request.turns, self.number))
        self.present[self.number] = request, self.drawn
        self.offset += self.drawn - request.held
        self.number += 1

    def remove(self, number: int) -> Request:
        """Take a request out of its place; what is left of it."""
        request, came = self.present.pop(number)
        self.offset -= came - request.held
        done = self.drawn - came
        return Request(request.left - done, request.turns, request.held + done, request.held + done)

    def step_to(self, tokens: float, waits: bool, most: int) -> None:
        """Draw so many tokens of every sequence. waits: others wait for a place. most: places that the responses could fill."""
        batch = len(self.present)
        # The reads grow with every token, and so the mean context of the stretch stands for all of it.
        token = self.decoder.token(batch, batch * (self.prompt + self.drawn + tokens / 2) - self.offset)
        limit: Limit = "longest response" if not waits and batch < TAIL * most else token.limit
        self.spend(tokens * token.seconds, limit)
        self.drawn += tokens

    def end_turns(self) -> None:
        """Remove those whose turn has ended; the environment answers those that have more."""
        while self.ends and (self.ends[0][0] <= self.drawn + INSTANT or self.ends[0][1] not in self.present):
            _, number = heappop(self.ends)
            if number not in self.present:
                continue
            one = self.remove(number)
            if one.turns > 1 and self.turns is not None:
                self.ask(Request(one.left, one.turns - 1, one.held + self.turns.observed_in_turn, one.held), number)

    def ask(self, request: Request, number: int) -> None:
        assert self.turns is not None
        if not self.turns.workers:  # the rank itself answers, and generates nothing meanwhile
            self.spend(self.turns.answer_s, "environment")
            heappush(self.away, (self.now, number, request))
            return
        answered = max(self.now, heappop(self.workers)) + self.turns.answer_s
        heappush(self.workers, answered)
        heappush(self.away, (answered, number, request))


def decoding(
    lengths: Sequence[float],
    places: int,
    prompt: float,
    decoder: Decoder,
    shared: float = 0.0,
    turns: Turns | None = None,
) -> dict[Limit, float]:
    """Seconds until the last response ends, by what limits them. lengths: in the order in which they take a place. shared: of a
    prompt's tokens, the part that another response has put into the cache. turns: of an environment."""
    each = 1 if turns is None else turns.whole
    waiting = deque(Request(one, each) for one in lengths)
    most, replica = min(places, len(lengths)), _Replica(decoder, prompt, shared, turns)
    thrown_out = False
    while waiting or replica.present or replica.away:
        while waiting and len(replica.present) < places and not thrown_out and replica.admits(waiting[0]):
            replica.admit(waiting.popleft())
        together = turns is not None and turns.together
        if replica.away and not replica.present:  # nothing to do before the next answer, or before all of them
            last = max(replica.away)[0] if together else replica.away[0][0]
            replica.spend(max(0.0, last - replica.now), "environment")
        if replica.away and (not replica.present or not together) and replica.away[0][0] <= replica.now + INSTANT:
            while replica.away and replica.away[0][0] <= replica.now + INSTANT:
                waiting.appendleft(heappop(replica.away)[2])
            continue
        replica.end_turns()  # forget ends of those that were thrown out; one may end in the same moment
        if not replica.present:
            thrown_out = False
            continue
        batch, tokens = len(replica.present), replica.ends[0][0] - replica.drawn
        full = (replica.room - replica.used) / batch
        if replica.away and not together:  # the next answer may come before the next end
            token_s = decoder.token(batch, batch * (prompt + replica.drawn) - replica.offset).seconds
            tokens = min(tokens, max(1.0, (replica.away[0][0] - replica.now) / token_s))
        thrown_out = full < tokens and batch > 1
        replica.step_to(max(0.0, full) if thrown_out else tokens, bool(waiting), most)
        if thrown_out:
            newest = next(reversed(replica.present))
            one = replica.remove(newest)
            waiting.appendleft(one._replace(computed=0.0))
            continue
        replica.end_turns()
    return replica.spent
