"""Generation by vLLM inside the trainer's ranks.

Every rank hosts one vLLM worker; tp neighbouring ranks form a replica, and the replicas share the requests. Weights never come
from disk: vLLM starts with dummy weights and `bridge/` fills them (`push_weights`). `vllm_process.py` contains vLLM's effects on
the process.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist

from megappo.bridge.destination import WeightReceiver
from megappo.bridge.sync import Route, WeightSource, WeightSync
from megappo.bridge.vllm_loader import VllmReceiver
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.models.hf_config import read_arch
from megappo.parallel.groups import meet
from megappo.rollout.process_state import EngineState
from megappo.rollout.types import KeptIds, Request, Response, SamplingParams
from megappo.rollout.vllm_limits import check_vllm
from megappo.rollout.vllm_memory import VllmMemory, require_sleep
from megappo.rollout.vllm_options import vllm_environment, vllm_options
from megappo.rollout.vllm_process import (
    colocated_executor,
    default_group_kept,
    new_identity,
    require_vllm,
    sees_peers,
    unlink_shared_memory,
    vllm_running,
)

Detokenize = Callable[[Sequence[int]], str]
_GROUPS_PER_REPLICA = 4  # with fewer, keeping equal prompts together would leave replicas idle


class _Drawn(NamedTuple):
    """A response in the form that is gathered over the ranks. finish: 0 length, 1 stop."""

    index: int
    tokens: array
    logprobs: array
    finish: int
    kept: KeptIds | None


class VllmEngine:
    """vLLM over the default process group, which must exist; construction is collective.

    config: layout, sizes and switches; dtype and lengths are arguments. model: directory with config.json. max_model_len: longest
    prompt plus response in tokens. eos_token_ids: end a response and are part of it. tokenizer: Hugging Face tokenizer directory,
    needed by vLLM for stop strings only; without one, they are searched in the text of `detokenize` (token ids -> text) after
    generation. timeouts: how long ranks wait for each other, in vLLM's groups and before a generation. ValueError for mistakes of
    the user: vLLM missing, or a limit of `vllm_limits`.
    """

    name = "vllm"

    def __init__(
        self,
        model: str,
        config: RolloutConfig,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
        device: torch.device,
        tokenizer: str | None = None,
        detokenize: Detokenize | None = None,
        timeouts: TimeoutsConfig = TimeoutsConfig(),
    ) -> None:
        require_vllm()
        world = dist.get_world_size()
        arch = read_arch(model)
        check_vllm(arch, config.tp, world, max_model_len, device.type)
        self.device = device
        self._tp = config.tp
        self._replicas = world // config.tp
        self._replica, self._tp_rank = divmod(dist.get_rank(), config.tp)
        self._max_model_len = max_model_len
        self._vocab_size = arch.vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokenizer = tokenizer
        self._detokenize = detokenize
        self._timeouts = timeouts
        self._version: int | None = None
        self._sync: WeightSync | None = None
        self._identity = new_identity()
        peers_visible = sees_peers(config.tp, device)
        self._environment = vllm_environment(config, device.type, peers_visible)
        self._own = EngineState(device)
        with self._running():
            from vllm import LLM

            require_sleep(LLM, config.sleep)
            self._llm: Any = LLM(
                **vllm_options(
                    config,
                    model,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    seed=seed,
                    device_type=device.type,
                    executor=colocated_executor(self._identity, device),
                    tokenizer=tokenizer,
                    peers_visible=peers_visible,
                    timeouts=timeouts,
                )
            )
            worker = self._llm.llm_engine.model_executor.driver_worker.worker
            self.receiver: WeightReceiver = VllmReceiver(worker, dtype)
            self._memory = VllmMemory(self._llm, worker, config.sleep)
            self._memory.sleep_cache()
            # vLLM would shut down at garbage collection or exit and destroy the trainer's process group; close() shuts it down.
            self._llm.llm_engine.engine_core._finalizer.detach()
        unlink_shared_memory(self._identity)

    def connect(self, policy: WeightSource) -> None:
        """Plan the transfer of the policy's parameters (see `bridge.sync.WeightSync`) into this engine. Collective."""
        self._sync = WeightSync(policy, self, Route.colocated(policy, self._tp), self.device)

    def push_weights(self, version: int) -> dict[str, float]:
        """Push the weights and compare their checksums. Collective."""
        assert self._sync is not None, "connect() comes before the first push"
        return self._sync.push(version)

    def _running(self) -> AbstractContextManager[None]:
        return vllm_running(self._own, self._environment)

    def weights_changing(self) -> None:
        self._version = None
        with self._running():
            self._memory.wake_weights()

    def weights_changed(self, version: int) -> None:
        with self._running():
            if not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self._version = version

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Response]:
        """Collective; see `rollout.types.RolloutEngine`. Temperature 0 gives the log-probs of temperature 1.

        ValueError for a request longer than the context and for stop strings without tokenizer. RuntimeError before the first push,
        after a failed one, and while the weights are asleep. RankIsLate if a rank does not come.
        """
        if self._version is None:
            raise RuntimeError("the vLLM engine holds no weights: none were pushed, or the last push failed")
        if self._memory.weights_asleep:
            raise RuntimeError("the vLLM engine's weights are asleep (rollout.sleep: all): push weights before it generates")
        self._check(requests, sampling)
        # The ranks of a replica would count the time of one that comes late within vLLM's exchanges, whose limit is short.
        meet("generation", self._timeouts.meeting_s)
        shares = share_requests([request.prompt for request in requests], self._replicas)
        with self._running():
            self._memory.wake_cache()
            drawn = self._draw(requests, shares[self._replica], sampling)
            self._finish_steps()
            self._memory.sleep_cache()
        return self._gather(drawn if self._tp_rank == 0 else [], len(requests))  # all tp ranks of a replica draw the same

    def sleep(self) -> None:
        """Release the weights until the next push (`rollout.sleep: all`); `generate` raises before it."""
        with self._running():
            self._memory.sleep_weights()

    def _finish_steps(self) -> None:
        """Let vLLM finish the steps that it scheduled ahead (asynchronous scheduling) and drop the answered requests."""
        # Until then it holds blocks of the cache and can neither reset nor release it.
        core = self._llm.llm_engine.engine_core
        while core.engine_core.scheduler.has_requests() or core.engine_core.batch_queue:
            core.get_output()

    def close(self) -> None:
        """Free the engine and its process groups, but not the default group; call it before that one is destroyed. Collective."""
        if self._llm is None:
            return
        with self._running(), default_group_kept():
            # vLLM's allocator cannot free memory that is asleep.
            self._memory.wake_weights()
            self._memory.wake_cache()
            self._llm.llm_engine.engine_core.engine_core.shutdown()
        self._llm = self._sync = self._version = None
        del self.receiver, self._memory

    def _check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        for index, request in enumerate(requests):
            total = len(request.prompt) + sampling.max_tokens
            if total > self._max_model_len or not request.prompt:
                raise ValueError(
                    f"request {index}: prompt of {len(request.prompt)} tokens plus max_tokens {sampling.max_tokens} "
                    f"is not within 1 and the engine's {self._max_model_len}"
                )
        if sampling.stop and self._tokenizer is None and self._detokenize is None:
            raise ValueError(
                f"rollout.stop: {list(sampling.stop)} needs a Hugging Face tokenizer or a detokenize function; "
                "leave it empty or use stop token ids"
            )

    def _draw(self, requests: Sequence[Request], share: Sequence[int], sampling: SamplingParams) -> list[_Drawn]:
        """Generate this replica's share."""
        if not share:
            return []
        prompts = [{"prompt_token_ids": list(requests[index].prompt)} for index in share]
        params = [self._vllm_sampling(sampling, requests[index].seed) for index in share]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [self._drawn(index, output.outputs[0], sampling) for index, output in zip(share, outputs, strict=True)]

    def _vllm_sampling(self, sampling: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VllmSampling

        native_stop = bool(sampling.stop) and self._tokenizer is not None
        return VllmSampling(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            stop=list(sampling.stop) if native_stop else None,
            stop_token_ids=[*self._eos_token_ids, *sampling.stop_token_ids],
            ignore_eos=True,  # the ids above end a response, not those of the tokenizer's files
            detokenize=native_stop,
            logprobs=self._best(sampling),  # of the sampled token and of this many best
            flat_logprobs=True,  # lists instead of one object per token
        )

    def _best(self, sampling: SamplingParams) -> int:
        """Number of most likely ids that vLLM reports for every token."""
        return min(sampling.kept_width, self._vocab_size)

    def _drawn(self, index: int, output: Any, sampling: SamplingParams) -> _Drawn:
        tokens = list(output.token_ids)
        best = self._best(sampling)
        logprobs = output.logprobs.logprobs[:: best + 1]
        assert output.logprobs.token_ids[:: best + 1] == tokens, "vLLM gives the sampled token first"
        kept = _kept_ids(output.logprobs.token_ids, output.logprobs.logprobs, best) if best else None
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended request {index} with {output.finish_reason!r}")
        finish = int(output.finish_reason == "stop")
        if sampling.stop and self._tokenizer is None:
            end = self._stop_length(tokens, sampling.stop)
            if end is not None:
                tokens, logprobs, finish = tokens[:end], logprobs[:end], 1
                kept = kept and kept.first(end)
        return _Drawn(index, array("q", tokens), array("f", logprobs), finish, kept)

    def _stop_length(self, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
        """Number of tokens up to the one that completes a stop string; None if there is none."""
        assert self._detokenize is not None
        detokenize = self._detokenize

        def stopped(length: int) -> bool:
            text = detokenize(tokens[:length])
            return any(string in text for string in stop)

        if not stopped(len(tokens)):
            return None
        return bisect_left(range(len(tokens) + 1), True, key=stopped)  # once complete, a stop string stays in the text

    def _gather(self, drawn: Sequence[_Drawn], count: int) -> list[Response]:
        """Gather the responses of all replicas, in request order. Collective."""
        everywhere: list[Sequence[_Drawn] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, drawn)
        responses: list[Response | None] = [None] * count
        assert self._version is not None
        for index, tokens, logprobs, finish, kept in (item for part in everywhere for item in part or ()):
            responses[index] = Response(tuple(tokens), tuple(logprobs), "stop" if finish else "length", self._version, kept)
        missing = [index for index, response in enumerate(responses) if response is None]
        if missing:
            raise RuntimeError(f"no replica answered request {missing[0]} ({len(missing)} of {count} in all)")
        return [response for response in responses if response is not None]


def _kept_ids(ids: Sequence[int], logprobs: Sequence[float], best: int) -> KeptIds:
    """ids, logprobs: for every token, the sampled id and the `best` most likely, with -inf for ids that top-k or top-p cut."""
    table = numpy.array(ids, dtype=numpy.int32).reshape(-1, best + 1)
    kept = (numpy.array(logprobs, dtype=numpy.float32) > -numpy.inf).reshape(table.shape)
    # The sampled id appears again among the best; if more ids tie than were requested, it may be missing and replaces the last.
    kept[:, 0] &= ~(kept[:, 1:] & (table[:, 1:] == table[:, :1])).any(1)
    kept[:, best] &= ~kept[:, 0]
    return KeptIds(array("i", kept.sum(1, dtype=numpy.int32).tobytes()), array("i", table[kept].tobytes()))


def share_requests(prompts: Sequence[Sequence[int]], replicas: int) -> list[list[int]]:
    """Indices of each replica's requests, ascending; every request once. Pure arithmetic, equal on every rank.

    Balanced by count, then by prompt tokens. Equal prompts (several samples of one) stay on one replica if there are enough
    different ones to balance.
    """
    # Equal prompts on one replica share its prefix cache.
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(index)
    units = list(groups.values())
    if len(units) < _GROUPS_PER_REPLICA * replicas:
        units = [[index] for index in range(len(prompts))]
    units.sort(key=lambda unit: (-len(unit), -len(prompts[unit[0]]), unit[0]))
    shares: list[list[int]] = [[] for _ in range(replicas)]
    tokens = [0] * replicas
    for unit in units:
        replica = min(range(replicas), key=lambda r: (len(shares[r]), tokens[r], r))
        shares[replica].extend(unit)
        tokens[replica] += len(unit) * len(prompts[unit[0]])
    return [sorted(share) for share in shares]
