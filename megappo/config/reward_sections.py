"""Keys of rewards and of the evaluations that use them. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from megappo.config.paths import DataPaths, FilePath
from megappo.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section
from megappo.config.urls import SecretVariable, ServerUrl

SampleField = Literal["id", "prompt", "response", "answer", "truncated", "num_tokens", "full_response", "tokens", "turns", "record"]


class RemoteConfig(Section):
    """Requests to a reward server (docs/rewards.md). Their samples are scored on the rank that holds them."""

    batch_size: Positive = 32
    """Most samples of one request."""
    concurrency: Positive = 8
    """Most requests of a rank at one time."""
    timeout_s: PositiveFloat = 30.0
    """Seconds for one request, from its connection to the last byte of the answer."""
    retry_budget_s: NonNegativeFloat = 60.0
    """Seconds after its first failure in which a request is repeated (broken connection, timeout, 408, 429, 5xx); then its
    samples have no score. 0 tries once."""
    token_env: SecretVariable | None = None
    """Environment variable with the token of `Authorization: Bearer ...`, whose name has to say that it is one: REWARD_TOKEN,
    RM_API_KEY."""
    send: tuple[SampleField, ...] = ("id", "prompt", "response", "answer", "truncated", "num_tokens")
    """Fields of a sample to send: the record of the data, full_response with stop string and special tokens, tokens as ids,
    turns as texts (with `rollout.environment`)."""
    ca_file: FilePath | None = None
    """Certificates (PEM) that verify the server, in place of the system's."""


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
    """Field with the tests (docs/code_rewards.md)."""
    entry_point_key: str | None = None
    """Field with the name of the function that test code's `check` is called with (HumanEval)."""
    setup_key: str | None = None
    """Field with code before the program, text or a list of lines (MBPP's imports)."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every test passes, else 0, and the first failure ends the tests. fraction: the share that passes."""
    timeout_s: PositiveFloat = 10.0
    """Seconds on the clock for all tests of a response."""
    memory_mib: Positive = 512
    """Address space of each process, in MiB."""
    max_processes: Positive = 8
    """Processes and threads of a program at one time."""
    packages: bool = False
    """Let programs import the packages of the run's environment."""
    workers: Positive = 4
    """Responses that a rank runs at one time."""
    i_accept_no_isolation: bool = False
    """Run programs without a sandbox, with your rights, where a machine cannot isolate them; false refuses the run there."""


class RewardPart(Section):
    name: str | None = None
    """Built-in rule (`megappo doctor` lists them); beside another kind of part, the name under which that is logged."""
    weight: float = 1.0
    """Factor of this part in the score."""
    model: Literal["reward_model"] | None = None
    """Scores by the section `reward_model`."""
    path: FilePath | None = None
    """Python file with your own reward, relative to the working directory; it runs with your rights (docs/rewards.md)."""
    function: str | None = None
    """Function of that file."""
    entry_point: str | None = None
    """Reward of an installed package: its entry point in the group `megappo.rewards`."""
    batch: bool = False
    """Call it with the list of a rank's samples and take a list of scores."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""
    workers: NonNegative = 0
    """Processes per rank that call it (or math_verify) for several responses at once, each with its own import; 0: the rank
    calls it."""
    timeout_s: PositiveFloat | None = None
    """Seconds for one call, after which its process is ended and the response has no score. Needs `workers`."""
    code: CodeRewardConfig | None = None
    """Run the program in a response against the tests of its record, in a sandbox (docs/code_rewards.md)."""
    url: ServerUrl | None = None
    """Address of a server that scores samples: https, or http to this machine, as `http://127.0.0.1:8000/score`."""
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
    """Field of the record whose value chooses the recipe."""
    map: Annotated[dict[str, tuple[RewardPart, ...]], Field(min_length=1)]
    """Value -> parts, written as `reward.parts`; the word default is for all other records, which are refused without it."""


class LengthPenaltyConfig(Section):
    per_token: PositiveFloat
    """Subtracted per response token beyond `start`."""
    start: NonNegative = 0
    """Response tokens without penalty."""


class RewardConfig(Section):
    parts: tuple[RewardPart, ...] = (RewardPart(name="exact_match"),)
    """Rules whose weighted sum is the score; each is logged under its name."""
    route: RewardRoute | None = None
    """In place of `parts`, several recipes, of which a label in the data chooses."""
    allow_hosts: tuple[str, ...] | None = None
    """Other machines that a part's `url` may name, as responses go there; null allows any over https, an empty list none."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a cut response."""
    length_penalty: LengthPenaltyConfig | None = None
    """Penalty for long responses."""
    max_without_verdict: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """Largest share of a step's responses without a score, which are left out (docs/rewards.md)."""
    above_max: Literal["stop", "redraw"] = "stop"
    """Above that share end with a checkpoint of the last step, or draw the step again with other prompts, 3 times, then
    end."""

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

    data: DataPaths
    """Held-out prompts, same forms as `data.train`, formatted and filtered by the keys of `data`."""
    prompt_key: str | None = None
    """Field with the question; null means `data.prompt_key`."""
    answer_key: str | None = None
    """Field with the reference answer; null means `data.answer_key`."""
    prompt_suffix: str | None = None
    """Text appended to every question; null means `data.prompt_suffix`."""
    prompts: Positive | None = None
    """Number of prompts, from the first; null means all."""
    reward: RewardConfig | None = None
    """Score of a response; null means the reward of the training."""
    n: Positive = 1
    """Responses to every prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among this many best tokens; -1 means all."""
    max_response_tokens: Positive | None = None
    """A longer response is cut; null means `rollout.max_response_tokens`."""
    every: NonNegative | None = None
    """Steps between evaluations, the last step too; 0: none, null means `trainer.eval_every`."""
    before: bool | None = None
    """Evaluate before the first step; null means `trainer.eval_before`."""
    correct_score: float = 1.0
    """Least score of a correct response, for pass@K and maj@N."""
    pass_at: tuple[Positive, ...] | None = None
    """K of pass@K; null means the powers of two up to n, and n."""
