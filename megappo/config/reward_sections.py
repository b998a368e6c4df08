"""Keys of rewards and of the evaluations that use them. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from megappo.config.paths import FilePath, PathText
from megappo.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from megappo.config.urls import SecretVariable, ServerUrl

SampleField = Literal["id", "prompt", "response", "answer", "truncated", "num_tokens", "full_response", "tokens", "turns", "record"]


class RemoteConfig(Section):
    """Requests to a reward server (docs/rewards.md). Their samples are scored on the rank that holds them."""

    batch_size: Positive = 32
    """Most samples of one request."""
    concurrency: Positive = 8
    """Most requests that one rank has under way."""
    timeout_s: PositiveFloat = 30.0
    """Limit for one request, from its connection to the last byte of its answer."""
    retry_budget_s: NonNegativeFloat = 60.0
    """Seconds after its first failure in which a request is tried again: after a refused or broken connection, a timeout, and the
    answers 408, 429 and 5xx. Then its samples have no score. 0 tries once."""
    token_env: SecretVariable | None = None
    """Environment variable with the token that every request carries (`Authorization: Bearer ...`). The token itself is never
    written down, so the name has to say that it is one: REWARD_TOKEN, RM_API_KEY."""
    send: tuple[SampleField, ...] = ("id", "prompt", "response", "answer", "truncated", "num_tokens")
    """Fields of a sample that the server is sent. record is the whole record of the data, full_response the text with the stop
    string and special tokens, tokens the sampled ids, turns the text of each turn of the policy (with `rollout.environment`)."""
    max_response_mib: PositiveFloat = 1.0
    """Largest answer; a larger one ends the run. A score takes some 25 bytes, and so does each further part of it."""
    ca_file: FilePath | None = None
    """Certificates (PEM) by which to verify the server, in place of the system's."""


PART_KINDS: Mapping[str, tuple[str, ...]] = {
    "path": ("function", "batch", "args", "workers", "timeout_s"),
    "entry_point": ("batch", "args", "workers", "timeout_s"),
    "code": (),
    "url": ("remote",),
    "model": (),
}
"""The key that decides the kind of a part -> further keys of that kind. The keys exclude each other; without any, a part is a
built-in rule."""


class CodeRewardConfig(Section):
    tests_key: str = "tests"
    """Field of the record (`a.b` reaches inside) with the tests: inputs and outputs, or test code (docs/code_rewards.md)."""
    entry_point_key: str | None = None
    """Field with the name of the function that test code's `check` is called with, as HumanEval has it; null: it calls itself."""
    setup_key: str | None = None
    """Field with code that comes before the program, text or a list of lines, as MBPP's imports; null: none."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every test passes, else 0, and the first that fails is the last that runs. fraction: the share that passes."""
    timeout_s: PositiveFloat = 10.0
    """Seconds for all tests of a response together, on the clock."""
    memory_mib: Positive = 512
    """Address space of each process of a program, in MiB."""
    max_processes: Positive = 8
    """Processes and threads of a program at one time."""
    packages: bool = False
    """Let programs import the packages of the run's environment, beside the standard library."""
    workers: Positive = 4
    """Responses that a rank runs at one time."""
    i_accept_no_isolation: bool = False
    """Run programs without a sandbox, with your rights: they can read your files and use the network. Without it a machine that
    cannot isolate them refuses the run."""


class RewardPart(Section):
    name: str | None = None
    """Name of a built-in rule; `megappo doctor` lists them. Beside another kind of part: the name under which that is logged."""
    weight: float = 1.0
    """Factor of this part in the score."""
    model: Literal["reward_model"] | None = None
    """Section of the reward model that scores (docs/rewards.md)."""
    path: FilePath | None = None
    """Python file with a reward of your own, relative to the working directory (docs/rewards.md). It runs with your rights."""
    function: str | None = None
    """Function of that file."""
    entry_point: str | None = None
    """Reward of an installed package: its entry point in the group `megappo.rewards`."""
    batch: bool = False
    """Call your own reward with the list of a rank's samples and take a list, instead of one by one."""
    args: dict[str, Any] = {}
    """Keyword arguments for your own reward."""
    workers: NonNegative = 0
    """Processes per rank that call your own reward, or math_verify, for several responses at once; each imports your code itself.
    0: the rank calls it, for one response after another."""
    timeout_s: PositiveFloat | None = None
    """Seconds that one call of your own reward may take; then its process is ended, the response has no score. Needs `workers`."""
    code: CodeRewardConfig | None = None
    """Run the program in a response against the tests of its record, in a sandbox. Logged as `code`, or under `name`."""
    url: ServerUrl | None = None
    """Address of a server that scores samples: https, or http to an address of this machine, as `http://127.0.0.1:8000/score`."""
    remote: RemoteConfig = RemoteConfig()
    """Requests to `url`."""

    @property
    def kind(self) -> str:
        """The key of PART_KINDS that is set, or `name` for a built-in rule."""
        return next((kind for kind in PART_KINDS if getattr(self, kind) is not None), "name")

    @property
    def label(self) -> str:
        """Name in metrics, records and messages: `mine.score` for the function score of mine.py."""
        if self.name is not None:
            return self.name
        if self.code is not None:
            return "code"
        return f"{Path(self.path).stem}.{self.function}" if self.path is not None else str(getattr(self, self.kind))

    @model_serializer(mode="wrap")
    def _short(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out unused keys: a built-in rule is dumped as its name and weight."""
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if key == "weight" or getattr(self, key) != fields[key].default}


DEFAULT_RECIPE = "default"  # word of `reward.route.map` for all records that no other of its labels is of


class RewardRoute(Section):
    key: str
    """Field of the record (`a.b` reaches inside) whose value chooses the recipe of its responses."""
    map: Annotated[dict[str, tuple[RewardPart, ...]], Field(min_length=1)]
    """Value of that field -> parts of the recipe, written as `reward.parts`. The word default is for all other records;
    without it such records are refused. A part of two recipes with the same settings is one part."""


class LengthPenaltyConfig(Section):
    per_token: PositiveFloat
    """Subtracted per response token beyond `start`."""
    start: NonNegative = 0
    """Response tokens without penalty."""


class RewardConfig(Section):
    parts: tuple[RewardPart, ...] = (RewardPart(name="exact_match"),)
    """Rules whose weighted sum is the score of a response; each is logged under its name."""
    route: RewardRoute | None = None
    """Several recipes in one run, in place of `parts`: a label in the data chooses among them. null: all have `parts`."""
    allow_hosts: tuple[str, ...] | None = None
    """Hosts of other machines that a part's `url` may name: responses go there. null allows any, over https; an empty list none."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response cut by the length limit."""
    length_penalty: LengthPenaltyConfig | None = None
    """Penalty for long responses, subtracted from the score; null: none."""
    max_without_verdict: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Largest share of a step's responses that may have no score (docs/rewards.md), reference answers that cannot be read not
    counted. They are left out; above it, `above_max`."""
    above_max: Literal["stop", "redraw"] = "stop"
    """stop: the run ends with a checkpoint of the last step. redraw: the step is drawn again with other prompts, 3 times, then it
    ends."""

    @property
    def recipes(self) -> dict[str, tuple[RewardPart, ...]]:
        """Label -> parts; without a route the only label is ""."""
        return {"": self.parts} if self.route is None else self.route.map

    @property
    def all_parts(self) -> dict[str, tuple[str, RewardPart]]:
        """Label -> (key, part) of every part, each once."""
        found: dict[str, tuple[str, RewardPart]] = {}
        for recipe, parts in self.recipes.items():
            for index, part in enumerate(parts):
                found.setdefault(part.label, (f"{self.key_of(recipe)}.{index}", part))
        return found

    def key_of(self, recipe: str) -> str:
        return "reward.parts" if self.route is None else f"reward.route.map.{recipe}"


class EvaluationConfig(Section):
    """A named set of `evaluations`."""

    data: PathText
    """Held-out prompts, same forms as `data.train`, formatted and filtered by the keys of `data`."""
    prompt_key: str | None = None
    """Field of a record that holds the question; null means `data.prompt_key`."""
    answer_key: str | None = None
    """Field of a record that holds the reference answer; null means `data.answer_key`."""
    prompt_suffix: str | None = None
    """Text appended to every question; null means `data.prompt_suffix`."""
    prompts: Positive | None = None
    """Number of prompts to evaluate on, from the first; null means all."""
    reward: RewardConfig | None = None
    """Score of a response, with the keys of the section `reward`; null means the reward of the training."""
    n: Positive = 1
    """Responses drawn for every prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: smallest set of tokens with this much probability."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among this many best tokens; -1 means all."""
    max_response_tokens: Positive | None = None
    """Responses are cut here; null means `rollout.max_response_tokens`."""
    every: NonNegative | None = None
    """Steps between evaluations; the last step evaluates too, 0 turns them off. null means `trainer.eval_every`."""
    before: bool | None = None
    """Evaluate before the first step; null means `trainer.eval_before`."""
    correct_score: float = 1.0
    """A response counts as correct, for pass@K and maj@N, if its score is at least this."""
    pass_at: tuple[Positive, ...] | None = None
    """K of pass@K; null means the powers of two up to n, and n."""
