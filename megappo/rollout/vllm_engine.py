"""Generation by vLLM inside the trainer's ranks. Every rank, or every rank of a `SubWorld`, hosts one vLLM worker; tp neighbouring
ranks form a replica. vLLM starts with dummy weights and `bridge/` fills them (`push_weights`). `vllm_process.py` contains vLLM's
effects on the process."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.bridge.adapter_sync import AdapterSource, AdapterSync, sync_of
from megappo.bridge.destination import WeightReceiver
from megappo.bridge.sync import Route, WeightSync
from megappo.config.run_sections import TimeoutsConfig
from megappo.config.schema import RolloutConfig
from megappo.models.families.registry import FAMILIES
from megappo.models.lora import shapes_beside_base
from megappo.parallel.device import ranks_of_run, world_group
from megappo.parallel.groups import meet
from megappo.rollout.subworld import SubWorld
from megappo.rollout.types import Replica, Request, Response, Routes, SamplingParams
from megappo.rollout.vllm_adapter import VllmAdapter
from megappo.rollout.vllm_images import inputs_with_images, register_text, register_vision, restore_normalisation
from megappo.rollout.vllm_limits import check_vllm
from megappo.rollout.vllm_memory import VllmMemory, require_sleep
from megappo.rollout.vllm_options import VllmModel, vllm_environment, vllm_options
from megappo.rollout.vllm_outputs import Detokenize, Drawing, Drawn, SampledRows, response_of
from megappo.rollout.vllm_process import (
    EngineState,
    colocated_executor,
    default_group_kept,
    new_identity,
    require_vllm,
    sees_peers,
    unlink_shared_memory,
    vllm_running,
)
from megappo.rollout.vllm_routes import WAY_OUT, RouteTap, routes_of_output
from megappo.runtime.messages import name_ranks


class VllmEngine:
    """vLLM over the default process group, which must exist, or over a subworld. Construction is collective over the engine's
    ranks.

    config: layout, sizes and switches; dtype and lengths are the model's. eos_token_ids: end a response and are part of it.
    detokenize: ids -> text, in which stop strings are searched after generation if vLLM has no tokenizer. timeouts: of vLLM's
    groups and of meetings. subworld: the engine's ranks, from `prepare_rollout_world`; None for all. cache_after_push: of requests
    that run at a push, which goes on with them; None refuses such a push. ValueError if vLLM is missing or for a limit of
    `vllm_limits`.
    """

    name = "vllm"

    def __init__(
        self,
        model: VllmModel,
        config: RolloutConfig,
        *,
        device: torch.device,
        eos_token_ids: Sequence[int],
        detokenize: Detokenize | None = None,
        timeouts: TimeoutsConfig = TimeoutsConfig(),
        subworld: SubWorld | None = None,
        cache_after_push: Literal["recompute", "keep"] | None = None,
    ) -> None:
        require_vllm()
        self._subworld = subworld
        check_vllm(model.arch, model.max_model_len, device.type, model.dtype == torch.float32)
        self.device, self._model = device, model
        self._replays = config.replays_experts and model.arch.moe is not None
        self._tp, self._meeting_s = config.tp, timeouts.meeting_s
        self._cache_after_push = cache_after_push
        with self.in_world():
            self.replica = _replica_of(config, self._meeting_s)
        self._eos_token_ids = tuple(eos_token_ids)
        self._detokenize = detokenize
        self._asked: dict[str, Drawing] = {}  # in the order of submission
        self._aside: list[Drawing] = []  # running, while the sampler has other weights than a step's
        self._early: list[Response] = []  # ended in a push, for the next poll
        self._num_early = 0  # of all ranks of the replica
        self._digest = 0  # of the tokens of this generation, in whatever order they finish
        self._version: int | None = None
        self._sync: WeightSync | AdapterSync | None = None
        self._route: Route | None = None  # of `connect_later`
        self._adapter_shapes = None if model.lora is None else shapes_beside_base(model.arch, model.lora)
        self._adapter: VllmAdapter | None = None
        with self.in_world():
            self._identity = new_identity()
            peers_visible = sees_peers(config.tp, device)
        self._environment = vllm_environment(device.type, peers_visible, returns_experts=self._replays)
        self._own = EngineState(device)
        with self._running():
            from vllm import LLM

            from megappo.bridge.vllm_loader import register

            register()
            require_sleep(LLM, config.sleep)
            if model.arch.vision is not None:
                register_vision(model.arch.architecture, model.images)
            elif model.arch.delta is not None:
                register_text(FAMILIES[model.arch.family].architecture())
            self._llm: Any = LLM(
                **vllm_options(
                    config,
                    model,
                    device_type=device.type,
                    executor=colocated_executor(self._identity, device),
                    peers_visible=peers_visible,
                    timeouts=timeouts,
                )
            )
            worker = self._llm.llm_engine.model_executor.driver_worker.worker
            if model.arch.vision is not None:
                restore_normalisation(worker)
            self.receiver: WeightReceiver = worker.weight_transfer_engine
            self._adapter = None if model.lora is None else VllmAdapter(worker, model.lora)
            self._tap = RouteTap(worker, model.arch) if self._replays and device.type == "cpu" else None
            self._memory = VllmMemory(self._llm, worker, config.sleep)
            self._memory.sleep_cache()
            # vLLM would shut down at garbage collection or exit and destroy the trainer's process group; close() shuts it down.
            self._llm.llm_engine.engine_core._finalizer.detach()
        with self.in_world():
            unlink_shared_memory(self._identity)

    def connect(self, policy: AdapterSource | None, route: Route | None = None) -> None:
        """Plan the transfer of the policy's parameters into this engine (see `bridge.sync.WeightSync`). Collective over the world.
        route: the ranks at both ends; None if both live on all. policy: None on a rank that it does not live on."""
        if route is None:
            assert policy is not None, "a policy on all ranks is on this one"
            route = Route.colocated(policy, self._tp)
        self._sync = sync_of(policy, self, route, self.device, self._model.dtype, self._adapter_shapes)

    def connect_later(self, route: Route, index: int, count: int) -> None:
        """Let the first `reroute` plan the transfer, whose destinations `route` does not know yet. index, count: number of this
        replica among those of the run, of which it is built apart."""
        self._route, self.replica = route, dataclasses.replace(self.replica, index=index, count=count)

    def take_adapter(self, tensors: Mapping[str, Tensor]) -> None:
        assert self._adapter is not None, "the engine was built without a place for adapters"
        with self._running():
            self._adapter.replace(tensors)

    def meet(self, before: str) -> None:
        meet(before, self._meeting_s)

    def reroute(self, destinations: tuple[int, ...]) -> None:
        """Take weights beside other ranks from here on: those of the engines that take part, in the world of now. Collective
        over it."""
        if self._sync is not None:
            self._sync = self._sync.rerouted(destinations)
        else:
            assert self._route is not None
            self.connect(None, dataclasses.replace(self._route, destinations=destinations))

    def drop(self) -> None:
        """Forget all requests. Collective over the replica, as `poll` is."""
        self._settle()
        self._abort()
        self._aside.clear()
        self.ended_in_push()

    def push_weights(
        self,
        version: int,
        *,
        recompute: bool = False,
        held: Callable[[Callable[[], dict[str, float]]], dict[str, float]] = lambda transfer: transfer(),
    ) -> dict[str, float]:
        """Push the weights and compare their checksums. With `cache_after_push` requests may be running: their segments end here,
        and they go on with the new weights. recompute: their cache, even if it is otherwise kept. held: calls the transfer, more
        than once if ranks are lost in it. Weights of a negative version, which are no step's, draw nothing of what runs: it goes on
        with the push after them. Collective."""
        assert self._sync is not None, "connect() comes before the first push"
        if self._cache_after_push is None:
            return self._sync.push(version)
        with self._running():
            running = self._cut(keeps_cache=self._cache_after_push == "keep" and not recompute and version >= 0)
        cut = [one for one in (running or self._asked.values()) if one.drawn.segments]
        running, self._aside = [*self._aside, *running], []
        if version < 0:
            running, self._aside = [], running
        recomputed = sum(len(one.rest().tokens) for one in running if one.drawn.segments)
        metrics = held(lambda: self._transferred(version))
        with self._running():
            for one in running:
                self._enter(one)
        return metrics | {"requests_cut": float(len(cut)), "tokens_recomputed": float(recomputed)}

    def _transferred(self, version: int) -> dict[str, float]:
        assert self._sync is not None
        return self._sync.push(version)

    def _cut(self, *, keeps_cache: bool) -> list[Drawing]:
        """Close the segments of all running requests. Return those that must be submitted again, taken out of vLLM: all, or none if
        their cache is kept."""
        self._settle()
        for one in self._asked.values():
            assert self._version is not None
            self._count(one)
            one.close_segment(self._version)
        self._require_same_tokens()
        if keeps_cache:
            return []
        return self._abort()

    def _abort(self) -> list[Drawing]:
        """Take all requests out of vLLM; return them."""
        running = list(self._asked.values())
        self._llm.llm_engine.abort_request(list(self._asked))
        self._asked.clear()
        self._finish_steps()
        if self._tap is not None:
            for one in running:
                self._tap.forget(one.internal)
        return running

    def _settle(self) -> None:
        """Take the answers of the steps that vLLM has scheduled ahead: their tokens are of the old weights; an abort loses them."""
        from vllm.v1.core.sched.interface import PauseState

        core, before = self._llm.llm_engine.engine_core.engine_core, len(self._asked)
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            self._early += self._step()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        self._num_early += before - len(self._asked)

    def drawn(self) -> dict[int, Drawn]:
        """Return what older weights have drawn for each running request, in the order of submission. Right after a push this is all
        there is to know of them: given to `submit` of a new engine, they go on to the same bits."""
        return {one.request.number: one.drawn for one in [*self._aside, *self._asked.values()]}

    def in_world(self) -> AbstractContextManager[None]:
        """Make the engine's ranks the world of torch.distributed: its default group, its store, ranks by position in it."""
        return nullcontext() if self._subworld is None else self._subworld.entered()

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self.in_world(), vllm_running(self._own, self._environment):
            yield

    def weights_changing(self) -> None:
        self._version = None
        with self._running():
            self._memory.wake_weights()

    def weights_changed(self, version: int) -> None:
        with self._running():
            # A kept cache is that of running requests alone: `_cache_salt`
            if self._cache_after_push != "keep" and not self._llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")
        self._version = version

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Keep the KV cache while requests are answered. Errors: see `rollout.types.RolloutEngine`."""
        if self._version is None:
            raise RuntimeError("the vLLM engine holds no weights: none were pushed, or the last push failed")
        if self._memory.weights_asleep:
            raise RuntimeError("the vLLM engine's weights are asleep (rollout.sleep: all): push weights before it generates")
        if self._asked:
            raise RuntimeError(f"the vLLM engine holds {len(self._asked)} requests of a generation that failed; make a new engine")
        with self._running():
            self._memory.wake_cache()
            self._digest = 0
            yield
            assert not self._asked, "requests were left unanswered"
            self._require_same_tokens()
            self._finish_steps()
            self._memory.sleep_cache()

    @contextmanager
    def between_pushes(self) -> Iterator[None]:
        """Context of `submit` and `poll` for requests that may go on after it, over pushes."""
        with self._running():
            yield

    @property
    def num_unfinished(self) -> int:
        return len(self._asked) + self._num_early

    @property
    def num_running(self) -> int:
        return self.num_unfinished

    @property
    def num_drawn(self) -> int:
        """Tokens of the running requests, of closed segments and of open ones."""
        return sum(one.drawn.num_tokens + len(one.rows.ids_table) for one in [*self._aside, *self._asked.values()])

    def submit(self, requests: Sequence[Request], sampling: SamplingParams, drawn: Mapping[int, Drawn] = {}) -> None:
        """Add requests; temperature 0 gives the log-probs of temperature 1. drawn: what was drawn of some responses in another
        engine, by number. ValueError for a request longer than the context or for stop strings without tokenizer."""
        self._check(requests, sampling)
        for request in requests:
            assert str(request.number) not in self._asked, f"request {request.number} is answered already"
            self._enter(Drawing(request, sampling, SampledRows(self._best(sampling)), drawn.get(request.number, Drawn())))

    def _enter(self, one: Drawing) -> None:
        from vllm.inputs import tokens_input

        core, request = self._llm.llm_engine, one.rest()
        name = str(request.number)
        if self._model.arch.vision is None:
            inputs = tokens_input(request.tokens.tolist(), cache_salt=self._cache_salt())
        else:
            inputs = inputs_with_images(request.tokens, self._model.arch.vision, self._model.images, self._cache_salt())
        adapter = None if self._adapter is None else self._adapter.request
        internal = core.add_request(name, inputs, self._vllm_sampling(one.sampling, request), lora_request=adapter)
        core.output_processor.request_states[internal].logprobs_processor = one.rows
        one.internal = internal
        self._asked[name] = one

    def poll(self) -> list[Response]:
        return self.ended_in_push() + self._step()

    def ended_in_push(self) -> list[Response]:
        """Return the responses that the last push found finished, once."""
        early, self._early, self._num_early = self._early, [], 0
        return early

    def _step(self) -> list[Response]:
        assert self._version is not None
        responses = []
        for output in self._llm.llm_engine.step():  # finished ones only
            one = self._asked.pop(output.request_id)
            self._count(one)
            routes = self._routes_of(one, output.outputs[0])
            if self.replica.answers(one.request.number):
                # vLLM looks for stop strings in what it drew itself, not across a cut
                stop = one.sampling.stop if self._model.tokenizer is None or one.drawn.segments else ()
                responses.append(response_of(one, output.outputs[0], self._version, stop, self._detokenize, routes))
        return responses

    def _routes_of(self, one: Drawing, output: Any) -> Routes | None:
        if not self._replays:
            return None
        routes = routes_of_output(output, self._model.arch) if self._tap is None else self._tap.take(one.internal)
        if routes is None:
            with self.in_world():
                rank = ranks_of_run(world_group())[dist.get_rank()]
            which = f"sample {one.request.number} on rank {rank}"
            raise RuntimeError(f"rollout.replay_experts: vLLM recorded no experts of {which}; {WAY_OUT}")
        return routes

    def _count(self, one: Drawing) -> None:
        self._digest += zlib.crc32(one.rows.ids_table[:, 0].tobytes(), one.request.number)

    def _cache_salt(self) -> str:
        # In the key of cached prefixes: what older weights computed is never found again
        return str(self._version)

    def sleep(self) -> None:
        """Release the weights until the next push (`rollout.sleep: all`); `serving` raises before it."""
        with self._running():
            self._memory.sleep_weights()

    def _require_same_tokens(self) -> None:
        """Raise RuntimeError if the ranks of the replica drew different tokens. Collective over the replica."""
        group = self.replica.group
        if group is None:
            return
        of_ranks = torch.zeros(group.size(), dtype=torch.int64)
        of_ranks[group.rank()] = self._digest
        dist.all_reduce(of_ranks, group=group)
        if len(set(of_ranks.tolist())) > 1:
            ranks = name_ranks(ranks_of_run(group))
            raise RuntimeError(
                f"{ranks} of a vLLM replica drew different tokens (digests {of_ranks.tolist()}); "
                "their responses are wrong, so none is used"
            )

    def _finish_steps(self) -> None:
        # vLLM schedules steps ahead (asynchronous scheduling), and until they end it holds blocks of the cache and can neither
        # reset nor release it.
        core = self._llm.llm_engine.engine_core
        while core.engine_core.scheduler.has_requests() or core.engine_core.batch_queue:
            core.get_output()

    def close(self) -> None:
        """Free the engine and its process groups, before the default group is destroyed; that one and the subworld's stay.
        Collective."""
        if self._llm is None:
            return
        with self._running(), default_group_kept():
            # vLLM's allocator cannot free memory that is asleep.
            self._memory.wake_weights()
            self._memory.wake_cache()
            worker = self._llm.llm_engine.model_executor.driver_worker.worker
            self._llm.llm_engine.engine_core.engine_core.shutdown()
            worker.weight_transfer_engine = None  # it holds the model, which vLLM's worker has let go of
            if self.replica.group is not None:
                dist.destroy_process_group(self.replica.group)
        self._llm = self._sync = self._version = None
        del self.receiver, self._memory

    def _check(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        for request in requests:
            given, limit = len(request.tokens), request.limit(sampling)
            if given + limit > self._model.max_model_len or given == 0:
                raise ValueError(
                    f"request {request.number}: prompt of {given} tokens plus max_tokens {limit} "
                    f"is not within 1 and the engine's {self._model.max_model_len}"
                )
        if sampling.stop and self._model.tokenizer is None and self._detokenize is None:
            raise ValueError(
                f"rollout.stop: {list(sampling.stop)} needs a Hugging Face tokenizer or a detokenize function; "
                "leave it empty or use stop token ids"
            )

    def _vllm_sampling(self, sampling: SamplingParams, request: Request) -> Any:
        from vllm import SamplingParams as VllmSampling
        from vllm.sampling_params import RequestOutputKind

        native_stop = bool(sampling.stop) and self._model.tokenizer is not None
        return VllmSampling(
            max_tokens=request.limit(sampling),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            stop=list(sampling.stop) if native_stop else None,
            stop_token_ids=[*self._eos_token_ids, *sampling.stop_token_ids],
            ignore_eos=True,  # the ids above end a response, not those of the tokenizer's files
            detokenize=native_stop,
            logprobs=self._best(sampling),  # of the sampled token and of this many best
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _best(self, sampling: SamplingParams) -> int:
        return min(sampling.top_k_width, self._model.arch.vocab_size)


def _replica_of(config: RolloutConfig, limit_s: float) -> Replica:
    """Return this rank's replica of tp neighbouring ranks. limit_s: of exchanges in its group. Collective."""
    index, count = dist.get_rank() // config.tp, dist.get_world_size() // config.tp
    group = None
    if config.tp > 1:
        limit = timedelta(seconds=limit_s)
        group, _ = dist.new_subgroups(config.tp, timeout=limit, backend="gloo", group_desc="replica")
        assert isinstance(group, dist.ProcessGroup), "every rank is in one replica"
    return Replica(index, count, group, config.max_num_seqs)
