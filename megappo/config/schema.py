"""Every key a run can set, with its type, range, default and meaning.

The models are frozen and reject unknown keys. The text under a field is its documentation: `docs/config.md`, the JSON schema and
`megappo config` are generated from it. Rules that involve two or more keys live in `checks.py`; reading YAML and command line
overrides lives in `loading.py`. Imports nothing of megappo but the rules of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from megappo.config.paths import FilePath, ModelPath, PathText
from megappo.config.urls import SecretVariable, ServerUrl

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
# Of a server: MLflow's may be paths with the name of a user.
TrackerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_/][A-Za-z0-9@/._-]{0,127}$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=False)


# ------------------------------------------------------------------------------------------------------------------ roles


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor-parallel size: every weight matrix is cut over this many ranks."""
    pp: Positive = 1
    """Pipeline-parallel size: the layers are cut into this many stages (1F1B schedule)."""
    vpp: Positive = 1
    """Model chunks of each pipeline stage (interleaved 1F1B: a smaller bubble for more communication). Needs pp > 1. The
    number of micro-batches is raised to a multiple of pp; with fewer sequences than that, some are empty."""
    cp: Positive = 1
    """Context-parallel size: the tokens of every sequence are cut over this many ranks, in zig-zag order. Sequences are padded
    to a multiple of 2 * cp tokens inside the model."""
    ep: Positive = 1
    """Expert-parallel size: the experts of a layer are distributed over this many of the tp * cp * dp ranks of a stage."""
    etp: Positive = 1
    """Tensor-parallel size of each expert; independent of tp (Megatron-core's own default is tp)."""
    sequence_parallel: bool = False
    """Shard the activations outside the matrix products over the tp ranks as well. Needs tp > 1; models with experts
    need it then."""
    layers_per_stage: tuple[Positive, ...] = ()
    """Layers of each of the pp * vpp (virtual) stages in the order of the model: chunk 0 of every stage, then chunk 1. Empty
    means an even split."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    beta1: Decay = 0.9
    """AdamW's decay of the first moment."""
    beta2: Decay = 0.95
    """AdamW's decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, applied to matrices only (never to norms and biases)."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns clipping off."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine reach `lr * min_lr_ratio` at the last optimizer step of the run."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate as a share of `lr` (linear and cosine)."""
    distributed: bool = True
    """Shard fp32 main parameters and moments over data-parallel ranks (Megatron-core's distributed optimizer, ZeRO-1)."""


class OffloadConfig(Section):
    parameters: bool = False
    """Keep weights in host memory while another role works."""
    gradients: bool = False
    """Free the gradient buffers while another role works."""
    optimizer: bool = False
    """Keep fp32 main parameters and moments in host memory from the end of a role's updates to the first optimizer step of its
    next ones; between these steps they stay on the GPU."""


class RoleConfig(Section):
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of weights and activations. With bf16, main parameters and gradient sums stay fp32."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout of the role over the ranks; what tp, cp and pp leave is data parallel."""
    micro_batch_tokens: Positive = 16384
    """Token budget of one packed micro-batch of a data-parallel rank (its cp ranks share it); a longer sequence gets a
    micro-batch of its own."""


class TrainableConfig(RoleConfig):
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: selective = core attention, full = every layer."""
    router_aux_coef: NonNegativeFloat = 0.0
    """Weight of the routers' balancing loss, per sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17-20); 0 leaves it out.
    For models with experts."""
    offload: OffloadConfig = OffloadConfig()
    """State to move off the GPU while another role works."""


class PolicyConfig(TrainableConfig):
    model: ModelPath
    """Directory of a Hugging Face checkpoint (config.json and safetensors), or its name on the hub (`owner/name`, or
    `owner/name@revision`), which is downloaded once."""
    logits_dtype: Literal["fp32", "bf16"] = "fp32"
    """Rounding of the logits behind the log-probs of policy and reference: fp32 does not round; bf16 rounds as a sampler in bf16
    does (docs/agreement.md)."""


class CriticConfig(TrainableConfig):
    model: ModelPath | None = None
    """Checkpoint that initialises the critic; null means `policy.model`. A reward or critic checkpoint may carry its head."""
    value_head: Literal["zero", "normal", "checkpoint"] = "zero"
    """Initial value head: zeros, normal(0, 1/(hidden+1)), or read from `model` (`score.weight` or `v_head.weight`)."""
    checkpoint: PathText | None = None
    """megappo run (`runs/NAME`: its newest checkpoint) or checkpoint (`runs/NAME/checkpoints/step-N`) whose weights initialise
    the critic instead of those of `model`; the layouts may differ. `model` still names the architecture. A resumed run takes
    its own weights."""
    checkpoint_role: Literal["critic", "policy"] = "critic"
    """Role of `checkpoint` to load: the critic with its value head, or the policy, under a new head (`value_head`)."""
    warmup_steps: NonNegative = 0
    """PPO steps at the start that train only the critic."""


class FrozenOffloadConfig(Section):
    parameters: bool = False
    """Keep weights in host memory while another role works."""


class ModelConfig(Section):
    """Implementation of the layers of all roles."""

    impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """TransformerEngine's layers, or Megatron-core's own (local) with torch attention; auto takes TransformerEngine on a GPU if it
    is installed."""


class FrozenConfig(RoleConfig):
    offload: FrozenOffloadConfig = FrozenOffloadConfig()
    """State to move off the GPU while another role works."""


class ReferenceConfig(FrozenConfig):
    model: ModelPath | None = None
    """Checkpoint of the reference model; null means `policy.model`."""


class RewardModelConfig(FrozenConfig):
    model: ModelPath | None = None
    """Sequence classifier with one label (`LlamaForSequenceClassification` and its like): a directory or a name on the hub; null:
    no reward model. It scores if a part of `reward.parts` is `{model: reward_model}`."""
    tokenizer: ModelPath | None = None
    """Its Hugging Face tokenizer, a directory or a name on the hub, or a SentencePiece .model file; null means `model`."""
    chat_template: bool = True
    """Show it the prompt's messages and the response as the assistant's by the chat template of its own tokenizer; false: the text
    of the prompt, and the response behind it."""
    center: float = 0.0
    """Subtracted from the model's number, for example its mean over the responses of the first policy."""
    scale: PositiveFloat = 1.0
    """Divides the centred number, for example its standard deviation over the same responses."""
    clip: PositiveFloat | None = None
    """Bound of the scaled number, on both sides; null turns it off."""


# ---------------------------------------------------------------------------------------------------------------- rollout


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0
    """Divides the logits, of the sampler and of recomputed log-probs alike; 0 (greedy) is for evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: smallest set of tokens with this much probability."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among this many best tokens; -1 means all."""
    replay_kept_tokens: bool = True
    """With top_p or top_k: record the ids that every token was sampled from, and compute the log-probs of policy and reference
    over the same ids. Needs top_k. If false, log-probs are over the whole vocabulary, and PPO's ratios belong to another
    distribution than the sampled one (docs/agreement.md)."""

    @property
    def truncates(self) -> bool:
        """True if top_p or top_k cuts anything."""
        return self.top_p < 1.0 or self.top_k > 0


class RolloutConfig(Section):
    engine: Literal["vllm", "megatron"] = "vllm"
    """vllm, or megatron: generation by the policy's own Megatron model, for platforms without vLLM and as a cross-check."""
    tp: Positive = 1
    """Tensor-parallel size of one vLLM replica; the world holds world_size / tp replicas."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the vLLM weights; auto means `policy.dtype`."""
    samples_per_prompt: Positive = 1
    """Responses drawn for every prompt of a training step."""
    max_response_tokens: Positive = 512
    """Responses are cut here; a cut response has no end-of-sequence token."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training responses."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the end-of-sequence token."""
    max_num_seqs: Positive = 256
    """Sequences that one vLLM replica decodes at once."""
    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4
    """Share of GPU memory that vLLM may take for weights and KV cache while it generates."""
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of one vLLM rank in GiB; null means the rest of `memory_share` on a GPU and 0.25 on the CPU."""
    sleep: Literal["none", "cache", "all"] = "none"
    """Memory that vLLM releases between generations: nothing, its KV cache, or also its weights while the models train."""
    enforce_eager: bool = False
    """Run vLLM's model without compilation and CUDA graphs."""
    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """Model runner of vLLM; auto leaves the choice to vLLM, which takes v2 if it can."""
    async_scheduling: bool | None = None
    """Let vLLM prepare a step while the previous one runs; null leaves the choice to vLLM, which does so if it can."""
    max_prob_diff: PositiveFloat = 0.01
    """Stop the run if the mean |probability difference| between sampler and trainer on sampled tokens exceeds this."""


# ------------------------------------------------------------------------------------------------------------------- data


class DataConfig(Section):
    train: PathText
    """Training prompts: a .jsonl or .parquet file, or the name of a Hugging Face dataset (`name`, or `name:subset:split`)."""
    eval: PathText | None = None
    """Held-out prompts for validation, same forms as `train`: one greedy answer each, scored by `reward`. `evaluations` names
    further sets."""
    tokenizer: ModelPath | None = None
    """Directory of a Hugging Face tokenizer or path of a SentencePiece .model file; null means `policy.model`."""
    prompt_key: str = "prompt"
    """Field of a record that holds the question (a string, or a list of chat messages); `a.b` reaches into a nested object."""
    answer_key: str = "answer"
    """Field of a record that holds the reference answer handed to the rewards (a string, or a number, which is read as its text);
    `a.b` reaches into a nested object."""
    chat_template: bool = True
    """Wrap the question with the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message before the question (needs `chat_template`)."""
    prompt_suffix: str = ""
    """Text appended to every question, for example an instruction on the answer's format."""
    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens."""
    overlong: Literal["filter", "error"] = "filter"
    """Handling of longer prompts: leave them out (the count is printed), or refuse the run. They are never truncated."""
    shuffle: bool = True
    """Visit the prompts in a new random order every epoch, seeded by `run.seed`."""
    prompts_per_step: Positive = 256
    """Prompts per PPO step (the train batch, before `rollout.samples_per_prompt`)."""
    fit_batch: bool = False
    """Lower `prompts_per_step` and `algorithm.mini_batch_size` to what data and data-parallel ranks can fill, and say so, instead
    of refusing a run that they do not fit."""
    eval_prompts: Positive | None = None
    """Number of held-out prompts to evaluate on, from the first; null means all."""


SampleField = Literal["id", "prompt", "response", "answer", "truncated", "num_tokens", "full_response", "tokens", "record"]


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
    answers 408, 429 and 5xx. Then the run ends. 0 tries once."""
    token_env: SecretVariable | None = None
    """Environment variable with the token that every request carries (`Authorization: Bearer ...`). The token itself is never
    written down, so the name has to say that it is one: REWARD_TOKEN, RM_API_KEY."""
    send: tuple[SampleField, ...] = ("id", "prompt", "response", "answer", "truncated", "num_tokens")
    """Fields of a sample that the server is sent. record is the whole record of the data, full_response the text with the stop
    string and special tokens, tokens the sampled ids."""
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
"""Key of a part that names what it is, exclusive -> the keys that belong to it. A part with none of them is a built-in rule."""


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
    """Section of the reward model that scores (docs/reward_model.md)."""
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
    """Seconds that one call of your own reward may take; then its process is ended, the response is undecided. Needs `workers`."""
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
        """Leave out what the part does not use: a built-in rule is its name and weight."""
        fields = type(self).model_fields
        return {key: value for key, value in handler(self).items() if key == "weight" or getattr(self, key) != fields[key].default}


class RewardRoute(Section):
    key: str | None = None
    """Field of the record (`a.b` reaches inside) whose value chooses the recipe of its responses; null: all have `reward.parts`."""
    map: dict[str, tuple[RewardPart, ...]] = {}
    """Value of that field -> parts of the recipe, written as `reward.parts`. A part of two recipes, with the same settings, is one
    part."""
    default: tuple[RewardPart, ...] = ()
    """Parts for records without the field, or with a value that `map` has not; empty: such records are refused."""


DEFAULT_RECIPE = "default"
"""Label of the responses that `reward.route.default` scores."""


class RewardConfig(Section):
    parts: tuple[RewardPart, ...] = (RewardPart(name="exact_match"),)
    """Rules whose weighted sum is the score of a response; each is logged under its name."""
    route: RewardRoute = RewardRoute()
    """Several recipes in one run, in place of `parts`: a label in the data chooses among them."""
    allow_hosts: tuple[str, ...] | None = None
    """Hosts of other machines that a part's `url` may name: responses go there. null allows any, over https; an empty list none."""
    missing_eos_penalty: NonNegativeFloat = 0.0
    """Subtracted from the score of a response cut by the length limit."""
    length_penalty: NonNegativeFloat = 0.0
    """Subtracted per response token beyond `length_penalty_start`."""
    length_penalty_start: NonNegative = 0
    """Response tokens without length penalty."""

    @property
    def recipes(self) -> dict[str, tuple[RewardPart, ...]]:
        """Label -> parts; without a route the one label is empty."""
        if self.route.key is None:
            return {"": self.parts}
        return {**self.route.map, **({DEFAULT_RECIPE: self.route.default} if self.route.default else {})}

    @property
    def all_parts(self) -> dict[str, tuple[str, RewardPart]]:
        """Label -> (key, part) of every part, once each."""
        found: dict[str, tuple[str, RewardPart]] = {}
        for recipe, parts in self.recipes.items():
            for index, part in enumerate(parts):
                found.setdefault(part.label, (f"{self.key_of(recipe)}.{index}", part))
        return found

    def key_of(self, recipe: str) -> str:
        """Key of the configuration that holds a recipe."""
        if self.route.key is None:
            return "reward.parts"
        return f"reward.route.map.{recipe}" if recipe in self.route.map else "reward.route.default"


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


# -------------------------------------------------------------------------------------------------------------- algorithm


class KLConfig(Section):
    placement: Literal["none", "reward", "loss"] = "reward"
    """Place of the KL to the reference: in the per-token reward, in the policy loss, or none (no reference is built)."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """k1 = log-ratio, k2 = half its square, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence")."""
    coef: NonNegativeFloat = 0.001
    """Factor of the KL (start value of the adaptive controller)."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive steers the factor towards `target` (Ziegler et al. 2019, section 2.2); only with placement: reward."""
    target: PositiveFloat = 6.0
    """KL per response that the adaptive controller aims at, in nats."""
    horizon: Positive = 10000
    """Responses over which the adaptive controller reacts."""


class AlgorithmConfig(Section):
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """GAE lambda of the policy's advantages."""
    lam_value: Fraction | None = None
    """GAE lambda of the critic's returns; null means `lam`."""
    lam_length_alpha: PositiveFloat | None = None
    """Length-adaptive policy lambda 1 - 1/(alpha * length) (VAPO, 2025); replaces `lam`."""
    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound the loss at this ratio for negative advantages (Ye et al. 2020); null turns it off."""
    value_clip: PositiveFloat | None = 0.2
    """Clip new values to this distance from the old ones in the value loss; null turns it off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Factor of the entropy bonus."""
    whiten_advantages: bool = True
    """Normalise advantages by mean and standard deviation of the global batch."""
    kl: KLConfig = KLConfig()
    """KL to the reference model."""
    ppo_epochs: Positive = 1
    """Passes over the responses of a step."""
    mini_batch_size: Positive = 256
    """Samples (responses) per optimizer step, over all data-parallel ranks."""
    target_kl: PositiveFloat | None = None
    """Stop the policy's updates of this step once the approximate KL to the sampling policy is above 1.5 times this.
    Skipped updates do not advance the learning-rate schedule."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-length"] = "token-mean"
    """Reduction of token losses to one number; fixed-length divides by samples * `rollout.max_response_tokens`."""
    bootstrap_truncated: bool = False
    """Bootstrap responses cut by the length limit with the critic's value after the last token instead of 0."""


# -------------------------------------------------------------------------------------------------------------------- run


class TimeoutsConfig(Section):
    """Seconds that a rank waits for the others before it ends the run."""

    start_s: PositiveFloat = 600.0
    """Limit for joining the world, and for each exchange inside a pass until one step has updated every role: connections are
    opened and kernels compiled until then. Messages between pipeline stages over gloo (CPU), and exchanges of
    vLLM's ranks on their devices, keep this limit."""
    pass_s: PositiveFloat = 120.0
    """Limit for each exchange inside a forward or backward pass, an optimizer step or a push of weights after that. A rank that
    hangs there is noticed after this time."""
    meeting_s: PositiveFloat = 3600.0
    """Limit for waiting on the host for ranks whose work takes longer: generation, rewards, loading, vLLM's start,
    checkpoints, exports. Must exceed the longest response, reward or save; a rank that hangs there is noticed after this time."""
    heartbeat_s: PositiveFloat = 30.0
    """Limit for the silence of a rank. Every rank has a watchdog that gives a sign of life each second; a rank that is stopped or
    dead, or whose interpreter is blocked, ends the run after this time, with a report and the stacks of all ranks."""
    section_s: PositiveFloat = 60.0
    """Least limit for one stage of a step, checkpoint or export. Once it has run 5 times, its limit is the larger of this and 5
    times the 99th percentile of its times; before that, and between the stages, `meeting_s`. A rank beyond it ends the run, as
    above."""


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")] = "run"
    """Name of the run; everything is written to `output_dir/name`."""
    output_dir: PathText = "runs"
    """Directory that holds the runs."""
    seed: NonNegative = 0
    """Seed of sampling, shuffling and initialisation."""
    num_ranks: Positive | None = None
    """Ranks that `megappo train` starts on this machine; null means one per GPU, or 1. Under torchrun and srun it must match the
    world."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; auto takes CUDA if it is available."""
    permissions: Literal["private", "group", "world"] = "group"
    """Readers of the run's files, among them trajectories and checkpoints: the owner alone, also the group, or everybody. Only the
    owner writes (umask 077, 027, 022)."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Limits on the time that ranks wait for each other."""
    replica_check_every: NonNegative = 100
    """Steps between comparisons of the weights that several ranks hold copies of, bit for bit; a difference ends the run (exit
    code 17). 0 turns them off."""


class TrainerConfig(Section):
    epochs: Positive = 1
    """Passes over the training prompts."""
    steps: Positive | None = None
    """PPO steps; null means `epochs` full passes."""
    eval_every: NonNegative = 10
    """Steps between validations on `data.eval` (greedy) and on the sets of `evaluations` without an `every` of their own; the last
    step validates too. 0 turns validation off."""
    eval_before: bool = True
    """Validate before the first step; a set of `evaluations` may say otherwise."""
    keep_best: str | None = None
    """Metric of an evaluation (`eval/score`, `eval/NAME/pass@4`, ...; `eval/NAME` is short for its mean@N): the checkpoint of the
    step with the best value so far is saved at once, and kept beside those of `checkpoint.keep_last` until a better one."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Best value of `keep_best`: the largest or the smallest; the earlier one of two equal ones."""


class CheckpointConfig(Section):
    save_strategy: Literal["steps", "epoch", "no"] = "steps"
    """Checkpoints after steps (`save_every`) and at the end; after each pass over the prompts and at the end; or none, except at a
    stop and at an error that leaves the state whole."""
    save_every: Literal["auto"] | NonNegative = "auto"
    """Steps between checkpoints; 0 saves at the end only. auto saves after the first step and then at the interval at which saving
    and work lost in failures cost least, sqrt(2 x seconds that a save holds training x `mtbf_hours`), at least every 30 minutes."""
    mtbf_hours: PositiveFloat | None = None
    """Mean time between failures of this job in hours, for `save_every: auto`; null counts with one software fault a day, however
    large the job, and one hardware fault of 64 GPUs every 5 days: 1 / (1/24 + ranks/7680)."""
    keep_last: Positive = 3
    """Checkpoints kept; older ones are removed after a newer one is complete."""
    save_only_model: bool = False
    """Save weights without optimizer, RNG and cursor: smaller, but not resumable."""
    asynchronous: bool = True
    """Copy the state to host memory and write it from there while training goes on, instead of waiting for the disk. A rank's copy
    takes as much host memory as its share of the checkpoint (`megappo plan` says how much); false takes none."""
    remote: PathText | None = None
    """Other storage for copies of the checkpoints, as an fsspec URL (`s3://bucket/path`, `file:///mnt/backup`): each goes to
    `remote/run.name/step-N` after it is complete, beside training. Nothing is removed there; credentials come from the
    environment."""
    export_at_end: bool = True
    """Write the final policy as a Hugging Face checkpoint to `export/` in the run directory."""


class TelemetryConfig(Section):
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Places besides metrics.jsonl that show the run: event files of TensorBoard, Weights & Biases, MLflow. Keys and addresses come
    from the environment or the library's own login (docs/telemetry.md). A tracker that fails costs records, never the run."""
    mode: Literal["online", "offline"] = "online"
    """offline: W&B and MLflow write into the run directory and need no account and no network."""
    project: TrackerName = "megappo"
    """Project of W&B, experiment of MLflow."""
    experiment: TrackerName | None = None
    """Name of the run in W&B and MLflow; null means `run.name`."""
    group: TrackerName | None = None
    """Group of runs in W&B, a tag in MLflow."""
    tags: tuple[str, ...] = ()
    """Tags of the run in W&B and MLflow."""
    histograms_every: NonNegative = 10
    """Steps between histograms of advantages, returns, values, KL, ratios and lengths in the trackers, the last step among them; 0
    makes none."""
    trajectories_every: NonNegative = 10
    """Steps between full trajectories; 0 writes none."""
    trajectories_per_step: Positive = 8
    """Number of trajectories to write at such a step: all samples of prompts that are drawn by `run.seed` and the step."""
    progress: tuple[str, ...] = ()
    """Metrics in the line that every step prints, by name (docs/statistics.md), for example
    `[reward/score_mean, perf/mfu/update_policy]`; empty for score, evaluation, KL, entropy, length, value loss, explained variance,
    tokens/s and seconds."""
    summary_every: NonNegative = 10
    """Steps between blocks of statistics on the console, each over the steps since the last one (docs/statistics.md); 0 prints
    none."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one rank, which MFU is measured against. null takes it from the profile of the GPU, for the role's dtype
    (`megappo/platform/hardware.yaml`); a CPU and a GPU without a profile have no MFU then."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps to profile: torch's trace of each, with the stages named, of every rank in the run's `profile/`. A profiled step is
    slower than others."""

    @property
    def histogram_interval(self) -> int:
        """Steps between histograms; 0 if there is no tracker to show them."""
        return self.histograms_every if self.trackers else 0


class TrainConfig(Section):
    """Configuration of `megappo train`."""

    run: RunConfig = RunConfig()
    """Name, place and processes of the run."""
    model: ModelConfig = ModelConfig()
    """Build of the layers of all roles."""
    kernels: Literal["auto", "cpp", "triton", "cuda", "reference"] = "auto"
    """Implementation of the ops (log-probs, advantages, losses): auto takes cuda, triton, reference on a GPU and cpp, reference
    on the CPU, in this order, without kernels that fail their check on a GPU; a named one that is missing or fails is an error.
    A GPU's name counts on the GPU only: advantages are computed on the host. docs/kernels.md has the figures."""
    policy: PolicyConfig
    """The model that is trained to act."""
    critic: CriticConfig = CriticConfig()
    """The model that learns the value of a prefix; with its own layout and optimizer."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL; built unless `algorithm.kl.placement` is none."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A frozen model whose score of the whole response is a part of the reward."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of responses."""
    data: DataConfig
    """Prompts and their format."""
    reward: RewardConfig = RewardConfig()
    """Score of a response."""
    evaluations: dict[str, EvaluationConfig] = {}
    """Named sets of held-out prompts beside `data.eval`, each with its own sampling, reward and interval (docs/evaluation.md)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """PPO."""
    trainer: TrainerConfig = TrainerConfig()
    """Length of the run and validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: interval, contents and number kept."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Records besides the metrics of every step."""


# -------------------------------------------------------------------------------------------------------------------- sft


class SftDataConfig(Section):
    train: PathText
    """Demonstrations: a .jsonl or .parquet file, or the name of a Hugging Face dataset."""
    tokenizer: ModelPath | None = None
    """Directory of a Hugging Face tokenizer or path of a SentencePiece .model file; null means `policy.model`."""
    prompt_key: str = "prompt"
    """Field that holds the question (a string, or a list of chat messages); `a.b` reaches into a nested object."""
    response_key: str = "answer"
    """Field that holds the response to learn; the loss covers its tokens and the end-of-sequence token."""
    chat_template: bool = True
    """Wrap the question with the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message before the question (needs `chat_template`)."""
    prompt_suffix: str = ""
    """Text appended to every question."""
    max_tokens: Positive = 1024
    """Longest prompt plus response; longer records are left out and counted."""


class SftTrainerConfig(Section):
    steps: Positive = 100
    """Optimizer steps."""
    batch_size: Positive = 64
    """Demonstrations per optimizer step over all data-parallel ranks."""


class SftConfig(Section):
    """Configuration of `megappo sft`."""

    run: RunConfig = RunConfig(name="sft")
    """Name, place and processes of the run."""
    model: ModelConfig = ModelConfig()
    """Build of the layers of all roles."""
    kernels: Literal["auto", "cpp", "triton", "cuda", "reference"] = "auto"
    """Implementation of the ops (log-probs, advantages, losses): auto takes cuda, triton, reference on a GPU and cpp, reference
    on the CPU, in this order, without kernels that fail their check on a GPU; a named one that is missing or fails is an error.
    A GPU's name counts on the GPU only: advantages are computed on the host. docs/kernels.md has the figures."""
    policy: PolicyConfig
    """The model that is fine-tuned."""
    data: SftDataConfig
    """Demonstrations and their format."""
    trainer: SftTrainerConfig = SftTrainerConfig()
    """Length of the run."""
