"""The server of `megappo serve-reward`: your own function, or a Hugging Face reward model, behind POST /score and GET /health.

docs/rewards.md, Remote rewards, has the protocol. It listens on loopback by default, and on another address only with a token and a
certificate, since megappo asks other machines over https.
"""

from __future__ import annotations

import argparse
import hmac
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from megappo.config.errors import ConfigError
from megappo.config.urls import is_loopback
from megappo.rewards.base import NoVerdict, RewardInput
from megappo.rewards.user import GROUP, load_rule
from megappo.rewards.wire import answer_body, samples_of
from megappo.runtime.user_code import OwnCode

MIB = 2**20


class Unscorable(ValueError):
    """Samples that can never be scored: answered with 422, which ends the run."""


class Scorer(Protocol):
    def __call__(self, samples: Sequence[RewardInput]) -> Sequence[Any]:
        """Score the samples, in order: a number, {score, parts}, or None for undecided. Raises Unscorable."""
        ...


class Function:
    """Scorer by a function of a file, as in `reward.parts: [{path: ..., function: ...}]`."""

    def __init__(self, place: str, *, batch: bool, args: dict[str, Any]) -> None:
        """Load `FILE:FUNCTION`. Raises ValueError, one line, if there is no such function."""
        path, colon, function = place.rpartition(":")
        if not colon:
            raise ValueError("write FILE:FUNCTION")
        self._rule = load_rule(function, OwnCode(GROUP, os.path.abspath(path), function, None, args), batch=batch)

    def __call__(self, samples: Sequence[RewardInput]) -> list[Any]:
        for sample in samples:
            if "answer" in self._rule.requires and not sample.answer:
                raise Unscorable(f"{self._rule.name} requires an answer, which sample {sample.sample_id} lacks")
        if self._rule.batch:
            found = self._called(list(samples), f"{len(samples)} samples") if samples else []
            return [None if isinstance(one, NoVerdict) else one for one in found]
        return [self._called(sample, f"sample {sample.sample_id}") for sample in samples]

    def _called(self, argument: Any, what: str) -> Any:
        try:
            value = self._rule.call(argument)
        except NoVerdict:
            return None
        except Exception as error:  # any fault of the user's code
            where = self._rule.place(error)
            raise Unscorable(f"{self._rule.name} raised {type(error).__name__}: {error}{where}; {what}") from error
        if isinstance(value, NoVerdict):
            return None
        return value.tolist() if hasattr(value, "tolist") else value  # NumPy and torch


class RewardModel:
    """Scorer by a sequence-classification checkpoint with one label: its logit at the last token of prompt and response."""

    def __init__(self, directory: str, *, device: str, dtype: str, batch_tokens: int) -> None:
        """Load the checkpoint. Raises ValueError, one line, if it is no reward model."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not Path(directory, "config.json").is_file():
            raise ValueError("is no directory of a Hugging Face checkpoint: it has no config.json")
        self._torch, self._device, self._batch_tokens = torch, torch.device(device), batch_tokens
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            directory, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype], output_loading_info=True
        )
        if model.config.num_labels != 1:
            raise ValueError(f"has {model.config.num_labels} labels, and a reward model has 1")
        if found["missing_keys"]:  # a language model without a head would get a random one
            raise ValueError(f"lacks weights of a reward model: {sorted(found['missing_keys'])[0]}")
        self._model = model.to(self._device).eval()
        self._longest: int | None = getattr(model.config, "max_position_embeddings", None)

    def __call__(self, samples: Sequence[RewardInput]) -> list[float]:
        ids = [self._encode(sample) for sample in samples]
        scores = [0.0] * len(ids)
        for batch in self._batches(ids):
            for i, score in zip(batch, self._scores([ids[i] for i in batch])):
                scores[i] = score
        return scores

    def _encode(self, sample: RewardInput) -> list[int]:
        if self._tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.response}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self._tokenizer(sample.prompt + sample.response)["input_ids"]
        if not ids or (self._longest is not None and len(ids) > self._longest):
            raise Unscorable(f"sample {sample.sample_id} has {len(ids)} tokens; the reward model takes 1 to {self._longest}")
        return ids

    def _batches(self, ids: Sequence[list[int]]) -> list[list[int]]:
        """Group indices of sequences of similar length, so that the padded tokens of each batch fit the budget."""
        batches: list[list[int]] = []
        for i in sorted(range(len(ids)), key=lambda i: -len(ids[i])):
            if batches and (len(batches[-1]) + 1) * len(ids[batches[-1][0]]) <= self._batch_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def _scores(self, ids: Sequence[list[int]]) -> list[float]:
        torch, longest = self._torch, max(map(len, ids))
        # transformers scores the last token that is not the padding's: an id with which no sequence ends.
        pad = next(i for i in range(len(ids) + 1) if all(sequence[-1] != i for sequence in ids))
        self._model.config.pad_token_id = pad
        tokens = torch.tensor([sequence + [pad] * (longest - len(sequence)) for sequence in ids], device=self._device)
        mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in ids], device=self._device)
        with torch.inference_mode():
            return self._model(input_ids=tokens, attention_mask=mask).logits[:, 0].float().tolist()


def make_app(scorer: Scorer, token: str | None, max_bytes: int) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    # Functions need not be thread-safe, and a GPU runs one batch at a time.
    one_at_a_time = anyio.CapacityLimiter(1)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        given = request.headers.get("Authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "the token is missing or wrong")
        body = await read(request, max_bytes)
        try:
            samples = samples_of(body)
            results = await anyio.to_thread.run_sync(scorer, samples, limiter=one_at_a_time)
            if len(results) != len(samples):
                raise Unscorable(f"{len(results)} results for {len(samples)} samples")
            return JSONResponse(answer_body(results))
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    return app


async def read(request: Request, max_bytes: int) -> bytes:
    """Read a request body. Raises HTTPException 413 beyond `max_bytes`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise HTTPException(413, f"the request is larger than {max_bytes / MIB:g} MiB (--max-request-mib)")
    return bytes(body)


def serve(app: FastAPI, listener: socket.socket, certificate: str | None, key: str | None) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are answered first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn re-raises the signal when done, which is no failure
    uvicorn.Server(settings_of(app, certificate, key)).run(sockets=[listener])


def settings_of(app: FastAPI, certificate: str | None = None, key: str | None = None) -> uvicorn.Config:
    """Settings of the server: quiet, HTTP only; requests under way get 30 s when it stops."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=30,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def token_of(args: argparse.Namespace) -> str | None:
    """Read the token from the environment. Raises ValueError, one line, if it is missing, or if the address needs more."""
    token = os.environ.get(args.token_env, "").strip() if args.token_env is not None else None
    if token == "":
        raise ValueError(f"--token-env {args.token_env}: the variable is not set")
    if not is_loopback(args.host) and (token is None or args.certificate is None):
        raise ValueError(f"--host {args.host} is open to other machines: give --token-env, --certificate and --key")
    return token


def scorer_of(args: argparse.Namespace) -> Scorer:
    """Load the scorer that the options name. Raises ValueError, one line, if it cannot score."""
    try:
        if args.function is not None:
            return Function(args.function, batch=args.batch, args=args.args)
        return RewardModel(args.model, device=args.device, dtype=args.dtype, batch_tokens=args.batch_tokens)
    except (ValueError, OSError) as error:
        name, value = ("--function", args.function) if args.function is not None else ("--model", args.model)
        raise ValueError(f"{name} {value}: {error}") from error


def serve_until_stopped(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises ValueError, one line, before it listens: no scorer, no token, no such address."""
    token = token_of(args)
    scorer = scorer_of(args)
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as error:  # OverflowError for a port out of range
        raise ConfigError(f"--host {args.host} --port {args.port}: {error}") from None
    host = f"[{args.host}]" if ":" in args.host else args.host
    scheme = "https" if args.certificate is not None else "http"
    print(f"scoring on {scheme}://{host}:{listener.getsockname()[1]}/score", flush=True)
    serve(make_app(scorer, token, int(args.max_request_mib * MIB)), listener, args.certificate, args.key)
    return 0
