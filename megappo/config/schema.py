"""Every key that a run can set, with its type, range, default and meaning; models are frozen and reject unknown keys.

The text under a field is its documentation: `docs/config.md`, the JSON schema and `megappo config` are generated from it. Further
sections are in `*_sections.py`, rules about several keys in `checks.py`, the reading of YAML and overrides in `loading.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field

from megappo.config.environment_sections import EnvironmentConfig
from megappo.config.paths import DataPaths, FilePath, ModelPath
from megappo.config.prompt_sections import CurriculumConfig, DynamicSamplingConfig
from megappo.config.rank_ranges import ALL, RankRanges
from megappo.config.reward_sections import EvaluationConfig, RewardConfig
from megappo.config.role_sections import (
    AnyCriticConfig,
    CriticConfig,
    ModelConfig,
    PolicyConfig,
    ReferenceConfig,
    RewardModelConfig,
    TeacherConfig,
    further_role,
)
from megappo.config.run_sections import CheckpointConfig, RunConfig, TelemetryConfig, TrainerConfig
from megappo.config.section import Fraction, LossAggregation, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

# ---------------------------------------------------------------------------------------------------------------- rollout


class SamplingConfig(Section):
    temperature: NonNegativeFloat = 1.0
    """Divides the logits of the sampler and of recomputed log-probs; 0 (greedy) is for evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with this much probability."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among this many best tokens; -1 means all."""
    replay_top_k_ids: bool = True
    """Compute the log-probs of policy and reference over the ids that every token was sampled from (docs/agreement.md);
    false: PPO's ratios are of another distribution. Needs `top_k`."""

    @property
    def truncates(self) -> bool:
        """True if top_p or top_k cuts anything."""
        return self.top_p < 1.0 or self.top_k > 0


class SamplerConfig(Section):
    """The engine that generates, and what ends a response."""

    engine: Literal["vllm", "megatron"] = "vllm"
    """vllm, or megatron: the policy's own Megatron model generates, where there is no vLLM or as a cross-check."""
    tp: Positive = 1
    """Tensor-parallel size of a vLLM replica; there are (ranks of the rollout) / tp replicas."""
    ranks: RankRanges = ALL
    """Ranks that generate, as of a role. Other ranks hold nothing of vLLM; ranks without a role only generate."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the vLLM weights; auto means `policy.dtype`."""
    max_response_tokens: Positive = 512
    """A longer response is cut, and has no end-of-sequence token."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, besides the end-of-sequence token."""
    max_num_seqs: Positive = 256
    """Sequences that a vLLM replica decodes at once."""
    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4
    """Share of GPU memory for vLLM's weights and KV cache while it generates."""
    kv_cache_gib: PositiveFloat | None = None
    """KV cache of a vLLM rank in GiB; null: the rest of `memory_share` on a GPU, 0.25 on the CPU."""
    sleep: Literal["none", "cache", "all"] = "none"
    """Memory that vLLM frees while the models train: nothing, its KV cache, or its weights too."""
    vllm_args: dict[str, Any] = {}
    """Further arguments of `vllm.EngineArgs` by their names there: `{enforce_eager: true, async_scheduling: false}`."""
    adapter: Literal["merged", "separate"] = "merged"
    """How `policy.lora` reaches vLLM: merged into the weights at every push, or alone, for vLLM's LoRA layers."""


class RolloutConfig(SamplerConfig):
    samples_per_prompt: Positive = 1
    """Responses to every prompt of a training step."""
    partial_rollout_tokens: Positive | None = None
    """Most tokens of a response that one step draws; a longer one goes on in the next steps and is scored once it has ended
    (T-PPO, docs/algorithms.md)."""
    environment: EnvironmentConfig | None = None
    """Environment that answers the policy's turns (docs/environments.md)."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training responses."""
    push_every: Positive = 1
    """Steps between pushes of weights into the sampler; responses are up to `push_every` - 1 steps old (docs/algorithms.md).
    The last step pushes too."""
    max_staleness: NonNegative | None = None
    """Generate beside training, on ranks of its own: a step's responses may begin under weights that are up to this many steps
    old. null: in turns."""
    cache_after_push: Literal["recompute", "keep"] = "recompute"
    """KV cache of responses that a push finds half drawn: computed again with the new weights, or kept as older ones left it."""
    replay_experts: Literal["auto", "none", "policy", "all"] = "auto"
    """Let the policy choose the experts that vLLM chose for a token, in log-probs and updates (R3, docs/agreement.md); all: the
    reference too. auto: policy, for models with experts, where vLLM draws and no environment answers."""
    max_prob_diff: PositiveFloat = 0.01
    """Stop the run if the mean |probability difference| between sampler and trainer exceeds this; steps with responses of
    older weights are not judged."""

    @property
    def drawn_tokens(self) -> int:
        """Most tokens of a response that one step draws."""
        return min(self.max_response_tokens, self.partial_rollout_tokens or self.max_response_tokens)

    @property
    def oldest_weights(self) -> int:
        """Steps before one from which its responses may have weights; 1: those of the step before."""
        return self.push_every + (self.max_staleness or 0)

    @property
    def shown_images(self) -> int:
        """Most images that an environment shows in a trajectory."""
        return 0 if self.environment is None else self.environment.images

    @property
    def replays_experts(self) -> bool:
        """True if the experts that vLLM chooses are recorded, for a model that has some."""
        return self.replay_experts != "none" and self.engine == "vllm" and self.environment is None

    @property
    def windows(self) -> int:
        """Most steps over which a response is drawn."""
        return -(-self.max_response_tokens // self.drawn_tokens)


# ------------------------------------------------------------------------------------------------------------------- data


class DataConfig(Section):
    train: DataPaths
    """Training prompts: a .jsonl or .parquet file, or the name of a Hugging Face dataset (`name`, or `name:subset:split`); or a
    list of them, read as one file."""
    eval: DataPaths | None = None
    """Held-out prompts, same forms as `train`: one greedy answer each, scored by `reward`."""
    tokenizer: ModelPath | None = None
    """Hugging Face tokenizer, or path of a SentencePiece .model file; null means `policy.model`. A response ends at its
    eos_token, and at `eos_token_id` of generation_config.json, else config.json, beside it and of the model."""
    prompt_key: str = "prompt"
    """Field with the question (a string, or a list of chat messages)."""
    answer_key: str = "answer"
    """Field with the reference answer (a string, or a number, read as text), which a record needs where something reads it."""
    chat_template: bool = True
    """Wrap the question with the tokenizer's chat template."""
    template_args: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}`. Exports have them as defaults."""
    system_prompt: str | None = None
    """System message before the question; needs `chat_template`."""
    prompt_suffix: str = ""
    """Text appended to every question, such as an instruction on the answer's format."""
    image_key: str | None = None
    """Field with a record's images: a path, bytes, a data: URI, or a list of such (docs/images.md); null: text alone."""
    image_root: FilePath | None = None
    """Folder that paths of images are relative to; null means that of the data file."""
    max_image_pixels: Positive | None = None
    """Larger images are made smaller; null means the limit of the model's preprocessor_config.json."""
    max_prompt_tokens: Positive = 512
    """Longest prompt in tokens."""
    overlong: Literal["filter", "error"] = "filter"
    """Longer prompts are left out and counted, or refuse the run; never truncated."""
    shuffle: bool = True
    """Visit the prompts in a new order every epoch, seeded by `run.seed`."""
    weight_key: str | None = None
    """Field with a record's weight w >= 0: an epoch visits it floor or ceil of prompts * w / sum of weights times."""
    curriculum: CurriculumConfig | None = None
    """Choice of prompts by their pass rates so far (docs/algorithms.md)."""
    prompts_per_step: Positive = 256
    """Prompts per PPO step, before `rollout.samples_per_prompt`."""
    eval_prompts: Positive | None = None
    """Number of held-out prompts, from the first; null means all."""


# -------------------------------------------------------------------------------------------------------------- algorithm


class FixedKLConfig(Section):
    """The factor is constant."""

    type: Literal["fixed"] = "fixed"


class AdaptiveKLConfig(Section):
    """Steers the factor towards `target` (Ziegler et al. 2019, section 2.2)."""

    type: Literal["adaptive"] = "adaptive"
    target: PositiveFloat = 6.0
    """KL per response to aim at, in nats."""
    horizon: Positive = 10000
    """Responses over which the controller reacts."""


class RewardKLConfig(Section):
    """KL in the reward of every token."""

    placement: Literal["reward"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of the log-ratio d: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence")."""
    coef: NonNegativeFloat = 0.001
    """Factor of the KL; the adaptive controller's start value."""
    controller: Annotated[FixedKLConfig | AdaptiveKLConfig, Field(discriminator="type")] = FixedKLConfig()
    """Change of the factor over the run."""


class LossKLConfig(Section):
    """A term of the policy's loss."""

    placement: Literal["loss"] = "loss"
    estimator: Literal["k2", "k3"] = "k3"
    """As in the reward; the gradient of k1 does not depend on the reference, so it is left out."""
    coef: NonNegativeFloat = 0.001
    """Factor of the KL."""


class NoKLConfig(Section):
    """No KL: no reference is built."""

    placement: Literal["none"] = "none"
    estimator: ClassVar[Literal["k1"]] = "k1"
    coef: ClassVar[float] = 0.0


KLConfig = RewardKLConfig | LossKLConfig | NoKLConfig


class DistillationConfig(Section):
    """On-policy distillation: minus `coef` times the reverse KL to the `teacher` at every sampled token, log policy - log teacher
    (docs/algorithms.md)."""

    placement: Literal["reward", "advantage"] = "reward"
    """Part of the token's reward, for advantages and critics alike; or of its advantage alone, after the estimator and
    whitening."""
    coef: PositiveFloat = 1.0
    """Factor of the KL."""


class RatioLossConfig(Section):
    """A loss of the ratio of the updated policy to another."""

    clip_low: PositiveFloat = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    """Policy that the ratio is against: the one before the step's updates (recomputed, the decoupled objective,
    arXiv:2110.00641), or the sampler by its recorded log-probs (docs/algorithms.md)."""


class PPOLossConfig(RatioLossConfig):
    """Clips the ratio of every token."""

    type: Literal["ppo"] = "ppo"
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bound the loss at this ratio for negative advantages (Ye et al. 2020)."""


class GSPOLossConfig(RatioLossConfig):
    """Clips the ratio of the response (arXiv:2507.18071). Needs `loss_aggregation: seq-mean-token-mean` and clip ranges such
    as the paper's 3e-4 and 4e-4."""

    type: Literal["gspo"] = "gspo"
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Same as `dual_clip` of ppo."""
    sequence_advantages: bool = False
    """Give every token the mean advantage of its response, as GSPO's objective has it; false is GSPO-token (eq. 13)."""


class CISPOLossConfig(RatioLossConfig):
    """Clips the importance weight of REINFORCE (arXiv:2506.13585); `clip_low` of 1 or more sets no lower bound."""

    type: Literal["cispo"] = "cispo"


class DISLossConfig(Section):
    """REINFORCE weighed by the ratio of the updated policy to the sampler's, without tokens whose ratio is outside `low` to
    `high` (SAO, arXiv:2607.07508)."""

    type: Literal["dis"] = "dis"
    low: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Lower bound; SAO has 0.7 or 0.2."""
    high: Annotated[float, Field(gt=1.0)] = 2.0
    """Upper bound; SAO has 6 or 4."""


LossConfig = PPOLossConfig | GSPOLossConfig | CISPOLossConfig | DISLossConfig


class NoImportanceSamplingConfig(Section):
    """Advantages are not weighed."""

    type: Literal["none"] = "none"


class TISConfig(Section):
    """Truncated importance sampling: the weight is at most `high`."""

    type: Literal["tis"] = "tis"
    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of each token, of the whole response, or the geometric mean over its tokens."""
    high: PositiveFloat = 2.0
    """Upper bound of the ratio."""


class MISConfig(Section):
    """Masked importance sampling: weight 0 above `high`."""

    type: Literal["mis"] = "mis"
    level: Literal["token", "sequence", "geometric"] = "token"
    """Same as `level` of tis."""
    high: PositiveFloat = 2.0
    """Upper bound of the ratio."""
    count_rejected: bool = True
    """Count tokens of weight 0 in the loss's denominator; false takes them out of the whole loss, entropy bonus and KL
    too."""


class IcePopConfig(Section):
    """Weight 0 above `high` or below `low`."""

    type: Literal["icepop"] = "icepop"
    level: Literal["token", "sequence", "geometric"] = "token"
    """Same as `level` of tis."""
    low: PositiveFloat
    """Lower bound of the ratio; the paper has 0.5."""
    high: PositiveFloat = 2.0
    """Upper bound; the paper has 5."""
    count_rejected: bool = True
    """Same as `count_rejected` of mis."""


ImportanceSamplingConfig = NoImportanceSamplingConfig | TISConfig | MISConfig | IcePopConfig


class EntropyBonusConfig(Section):
    """The factor is constant."""

    type: Literal["bonus"] = "bonus"
    coef: NonNegativeFloat = 0.0
    """Factor of the entropy bonus; 0 leaves it out."""


class EntropyTargetConfig(Section):
    """The bonus acts while a step's entropy is at most `target`; its factor rises by 0.005 in a step below it and falls in
    any other (Skywork-OR1, arXiv:2505.22312)."""

    type: Literal["target"] = "target"
    target: PositiveFloat
    """Entropy per sampled token to aim at, in nats."""
    coef: NonNegativeFloat = 0.0
    """Factor of the first step."""


class PositiveNLLConfig(Section):
    """Likelihood of the sampled tokens of correct responses, beside the policy's loss (VAPO, arXiv:2504.05118)."""

    coef: PositiveFloat = 0.1
    """Factor of their mean negative log-likelihood; the paper's is 0.1."""
    score: float = 1.0
    """Least score of a correct response."""


class Estimator(Section):
    """An estimator of the advantages, and what checks and stages ask about it. One that compares groups has its formula in
    `algo.groups.COMPARISONS`."""

    has_critic: ClassVar[bool] = False  # the advantages come from a critic's values
    compares_groups: ClassVar[bool] = False  # the advantage of a response depends on the other responses to its prompt
    discounts: ClassVar[bool] = False  # it reads algorithm.gamma
    whitens: ClassVar[bool] = False  # default of algorithm.whiten_advantages: true for one without a baseline of its own


class GAEConfig(Estimator):
    """Generalised advantage estimation over the critic's values."""

    has_critic = discounts = whitens = True
    type: Literal["gae"] = "gae"
    level: Literal["token", "turn"] = "token"
    """Time step of `gamma`, `lam` and lengths: a sampled token, or a turn between observations (Turn-PPO,
    docs/algorithms.md)."""


class VTraceConfig(Estimator):
    """The critic's values with ratios of the trainer's policy to the sampler's (arXiv:1802.01561)."""

    has_critic = discounts = whitens = True
    type: Literal["vtrace"] = "vtrace"
    rho_bar: PositiveFloat = 1.0
    """Upper bound of the ratio that weighs a token's TD error and advantage."""
    c_bar: PositiveFloat = 1.0
    """Upper bound of the ratio by which later TD errors reach back; at most `rho_bar`."""


class GRPOConfig(Estimator):
    """Compares the responses to a prompt."""

    compares_groups = True
    type: Literal["grpo"] = "grpo"
    divide_by_group_std: bool = True
    """Divide by the standard deviation of the group's rewards; false is Dr. GRPO (arXiv:2503.20783)."""


class RLOOConfig(Estimator):
    """Compares a response with the mean of the others to its prompt."""

    compares_groups = True
    type: Literal["rloo"] = "rloo"


class ReinforcePlusPlusConfig(Estimator):
    """Whitens returns."""

    discounts = whitens = True
    type: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class ReMaxConfig(Estimator):
    """Compares a response with a greedy one."""

    type: Literal["remax"] = "remax"


EstimatorConfig = GAEConfig | VTraceConfig | GRPOConfig | RLOOConfig | ReinforcePlusPlusConfig | ReMaxConfig
ESTIMATORS: dict[str, type[Estimator]] = {one.model_fields["type"].default: one for one in get_args(EstimatorConfig)}


class PtxConfig(Section):
    """Language-modelling loss of the policy on a second data set (InstructGPT, arXiv:2203.02155, eq. 2)."""

    data: DataPaths
    """Texts: a .jsonl or .parquet file, or the name of a Hugging Face dataset."""
    coef: PositiveFloat = 0.05
    """Factor of the texts' mean negative log-likelihood, added to every update of the policy."""
    text_key: str = "text"
    """Field with the text."""
    max_tokens: Annotated[int, Field(ge=2)] = 1024
    """Longest sequence; a longer text is cut into several."""
    batch_size: Positive = 64
    """Sequences in each update, over all data-parallel ranks."""


class AlgorithmConfig(Section):
    estimator: Annotated[EstimatorConfig, Field(discriminator="type")] = GAEConfig()
    """Estimator of the advantages (docs/algorithms.md); all but gae and vtrace build no critic."""
    gamma: Fraction = 1.0
    """Discount per token, or per turn (`estimator.level`)."""
    lam: Fraction = 0.95
    """GAE lambda of the policy's advantages."""
    lam_value: Fraction | None = None
    """GAE lambda of the critic's returns; null means `lam`."""
    lam_length_alpha: PositiveFloat | None = None
    """Length-adaptive policy lambda 1 - 1 / (alpha * length) (VAPO, arXiv:2504.05118) in place of `lam`."""
    loss: Annotated[LossConfig, Field(discriminator="type")] = PPOLossConfig()
    """Surrogate of the policy's loss (docs/algorithms.md)."""
    importance_sampling: Annotated[ImportanceSamplingConfig, Field(discriminator="type")] = NoImportanceSamplingConfig()
    """Weight of the policy gradient by trainer's probability before the update / sampler's recorded one
    (docs/algorithms.md)."""
    high_entropy_token_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Train on this share of a step's sampled tokens, those of highest entropy (0.2 in arXiv:2506.01939); the others have
    advantage 0."""
    value_of_critics: Literal["mean", "min"] = "mean"
    """Value of a prefix with several `critics`: mean or least of theirs."""
    disagreement_mask_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Give advantage 0 to this share of a step's sampled tokens, those on which `critics` deviate least (0.2 in AsyPPO,
    arXiv:2510.01656)."""
    disagreement_entropy_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Leave this share of the sampled tokens out of the entropy bonus, those on which `critics` deviate most (0.2 in
    AsyPPO)."""
    mask_truncated: bool = False
    """Leave cut responses out of the policy's loss (DAPO, arXiv:2503.14476); they still count in their group's mean and for
    the critic."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Replace prompts whose responses all score the same by the next ones, in further rounds (DAPO, arXiv:2503.14476,
    3.2)."""
    entropy: Annotated[EntropyBonusConfig | EntropyTargetConfig, Field(discriminator="type")] = EntropyBonusConfig()
    """Bonus of the policy's entropy."""
    positive_nll: PositiveNLLConfig | None = None
    """Likelihood of correct responses in the policy's loss (VAPO)."""
    ptx: PtxConfig | None = None
    """Language-modelling loss on a second data set (InstructGPT)."""
    whiten_advantages: bool | None = None
    """Normalise advantages over the global batch; null: for gae, vtrace and reinforce_plus_plus, as the others have a
    baseline already."""
    kl: Annotated[KLConfig, Field(discriminator="placement")] = RewardKLConfig()
    """Place of the KL to the reference model."""
    distillation: DistillationConfig | None = None
    """Learn from the log-probs of a `teacher`, alone or beside the reward."""
    ppo_epochs: Positive = 1
    """Passes over the responses of a step."""
    mini_batch_size: Positive = 256
    """Samples (responses) per optimizer step, over all data-parallel ranks."""
    target_kl: PositiveFloat | None = None
    """Stop a step's policy updates once the approximate KL is above 1.5 times this; skipped updates do not advance the
    learning-rate schedule."""
    loss_aggregation: LossAggregation = "token-mean"
    """Reduction of token losses; fixed-length divides by samples * `rollout.max_response_tokens`."""
    bootstrap_truncated: bool | Literal["last"] = False
    """Value after a response that the length limit cut: false 0, true the critic's after the last token, last that of the
    last token or turn (EGAE, arXiv:2506.15050). Unfinished partial rollouts have last, unless this is true."""

    @property
    def has_critic(self) -> bool:
        """True if the advantages come from a critic's values."""
        return self.estimator.has_critic

    @property
    def compares_groups(self) -> bool:
        """True if the advantage of a response depends on the other responses to its prompt."""
        return self.estimator.compares_groups

    @property
    def by_turns(self) -> bool:
        """True if the time steps of the advantages are turns."""
        return self.estimator.type == "gae" and self.estimator.level == "turn"

    @property
    def old_logprob(self) -> Literal["logprob", "rollout_logprob"]:
        """Field of the log-probs in the denominator of the update's ratio."""
        return "rollout_logprob" if self.loss.type == "dis" or self.loss.proximal == "behaviour" else "logprob"

    @property
    def sequence_advantages(self) -> bool:
        """True if every token of a response gets the mean of the response's advantages."""
        return self.loss.type == "gspo" and self.loss.sequence_advantages

    @property
    def drops_rejected(self) -> bool:
        """True if tokens that the correction rejects count nowhere in the policy's loss."""
        return isinstance(self.importance_sampling, MISConfig | IcePopConfig) and not self.importance_sampling.count_rejected

    @property
    def whitens(self) -> bool:
        """Value of `whiten_advantages`, or its default for the estimator."""
        return self.estimator.whitens if self.whiten_advantages is None else self.whiten_advantages


# ------------------------------------------------------------------------------------------------------------------ train

CriticName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]{1,32}$")]


class TrainConfig(Section):
    """Configuration of `megappo train`."""

    learner: ClassVar[str] = "policy"
    """Role that the other models start from, as `SupervisedConfig.learner`: its base may be the reference, and it is exported."""

    run: RunConfig = RunConfig()
    """Name, place and processes of the run."""
    model: ModelConfig = ModelConfig()
    """Build of the layers of all roles."""
    kernels: Literal["auto", "cpp", "triton", "cuda", "reference"] = "auto"
    """Implementation of the ops (docs/kernels.md): auto tries cuda, triton, reference on a GPU and cpp, reference on the CPU;
    a named one that is missing or fails its check is an error."""
    policy: PolicyConfig
    """The model that is trained to act."""
    critic: CriticConfig = CriticConfig()
    """The model that learns the value of a prefix; built if `algorithm.estimator` is gae or vtrace."""
    critics: dict[CriticName, AnyCriticConfig] = {}
    """Further critics by name; `b: {}` makes the role `critic_b` with the defaults (docs/algorithms.md)."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL; built unless `algorithm.kl.placement` is none."""
    teacher: TeacherConfig = TeacherConfig()
    """The frozen model that the policy is distilled from; built if `algorithm.distillation` is set."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A frozen model that scores whole responses."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of responses."""
    data: DataConfig
    """Prompts and their format."""
    reward: RewardConfig = RewardConfig()
    """Score of a response."""
    evaluations: dict[str, EvaluationConfig] = {}
    """Named sets of held-out prompts beside `data.eval`, each with its own sampling and reward (docs/evaluation.md)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """PPO."""
    trainer: TrainerConfig = TrainerConfig()
    """Length of the run and validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: interval, contents and number kept."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Records besides the metrics of every step."""

    @property
    def critics_in_use(self) -> dict[str, AnyCriticConfig]:
        """Role -> section of the critics of this run; empty under an estimator without one."""
        further = {further_role(name): one for name, one in self.critics.items()}
        return {"critic": self.critic, **further} if self.algorithm.has_critic else {}
