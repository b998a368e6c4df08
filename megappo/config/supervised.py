"""Every key of a supervised run (`megappo sft`, `train-reward-model`, `dpo`), with its documentation as in `schema.py`. A kind of
supervised training is a class here, a reader of its data in `trainer/prepare/supervised.py` and a loss in `trainer/kinds/`;
everything else is shared."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megappo.config.paths import DataPaths, FilePath, ModelPath
from megappo.config.reward_sections import RewardConfig
from megappo.config.role_sections import FrozenConfig, ModelConfig, PolicyConfig, TeacherConfig, TrainableConfig, section_of
from megappo.config.run_sections import CheckpointConfig, RunConfig, TelemetryConfig
from megappo.config.schema import SamplerConfig, TrainConfig
from megappo.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class SupervisedTrainerConfig(Section):
    epochs: Positive = 1
    """Passes over the training data."""
    steps: Positive | None = None
    """Optimizer steps; null means `epochs` full passes."""
    batch_size: Positive = 64
    """Examples per optimizer step over all data-parallel ranks."""
    eval_every: NonNegative = 10
    """Steps between passes over the held-out data of `data.eval` and `evaluations`; the last step has one too. 0: none."""
    eval_before: bool = True
    """Evaluate before the first step."""
    keep_best: str | None = None
    """Metric of an evaluation (`eval/loss`, `eval/NAME/loss`, `eval/score`) whose best checkpoint is kept beside
    `checkpoint.keep_last`: the largest, or the smallest with `min eval/loss`; the earlier of equal ones."""


class SupervisedDataConfig(Section):
    train: DataPaths
    """Training data: a .jsonl or .parquet file, or the name of a Hugging Face dataset, or a list of them."""
    eval: DataPaths | None = None
    """Held-out data, same forms as `train`: its figures are logged as `eval/...`, such as `eval/loss`."""
    tokenizer: ModelPath | None = None
    """Hugging Face tokenizer, or path of a SentencePiece .model file; null means the model's own."""
    chat_template: bool = True
    """Wrap the question with the tokenizer's chat template."""
    template_args: dict[str, Any] = {}
    """Variables of the chat template, such as `{enable_thinking: false}`. Exports have them as defaults."""
    system_prompt: str | None = None
    """System message before the question (needs `chat_template`)."""
    max_tokens: Positive = 1024
    """Most tokens of a sequence."""
    overlong: Literal["filter", "error"] = "filter"
    """Records with a longer sequence are left out and counted, or refuse the run; never truncated."""
    shuffle: bool = True
    """Visit the examples in a new order every epoch, seeded by `run.seed`."""


class SupervisedConfig(Section):
    """Keys that every kind of supervised training has. A kind adds `kind`, its `data`, and the sections of its roles."""

    command: ClassVar[str]
    """Command that runs files of this kind."""
    unit: ClassVar[str]
    """Word for an example."""
    sequences: ClassVar[int] = 1
    """Most sequences of an example, for the plan."""
    learner: ClassVar[str] = "policy"
    """Role that trains."""
    figures: ClassVar[tuple[str, ...]] = ("loss",)
    """Figures of an evaluation."""

    run: RunConfig = RunConfig()
    """Name, place and processes of the run."""
    model: ModelConfig = ModelConfig()
    """Build of the layers of all roles."""
    kernels: Literal["auto", "cpp", "triton", "cuda", "reference"] = "auto"
    """Implementation of the ops (docs/kernels.md): auto tries cuda, triton, reference on a GPU and cpp, reference on the CPU;
    a named one that is missing or fails its check is an error."""
    data: SupervisedDataConfig
    """Examples and their format."""
    evaluations: dict[str, DataPaths] = {}
    """Named held-out data beside `data.eval`: `{hard: hard.jsonl}` logs `eval/hard/loss`."""
    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()
    """Length of the run and evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: interval, contents and number kept."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Records besides the metrics of every step."""

    @property
    def name(self) -> str:
        """Name of the kind, and of the group of its metrics."""
        return vars(self)["kind"]

    @property
    def learner_section(self) -> TrainableConfig:
        """Section of the role that trains."""
        return section_of(self, self.learner)

    @property
    def has_reference(self) -> bool:
        """True if the loss reads log-probs of a frozen model, the section `reference`."""
        return False

    @property
    def has_teacher(self) -> bool:
        """True if the loss reads the distributions of a frozen model, the section `teacher`."""
        return False

    @property
    def sampler(self) -> SamplerConfig | None:
        """Section of what generates answers to held-out prompts; None if nothing does."""
        return None

    @property
    def held_out(self) -> dict[str, str | tuple[str, ...]]:
        """Name -> held-out data, `data.eval` first, under the empty name."""
        return {**({} if self.data.eval is None else {"": self.data.eval}), **self.evaluations}


# --------------------------------------------------------------------------------------------------------------------- sft


class PicturedDataConfig(SupervisedDataConfig):
    image_key: str | None = None
    """Field with the images of a prompt, as `data.image_key` of `megappo train` (docs/images.md)."""
    image_root: FilePath | None = None
    """Folder that paths of images are relative to; null means that of the data file."""
    max_image_pixels: Positive | None = None
    """Larger images are made smaller; null means the limit of the model's preprocessor_config.json."""


class SftDataConfig(PicturedDataConfig):
    prompt_key: str = "prompt"
    """Field with the question (a string, or a list of chat messages)."""
    response_key: str = "answer"
    """Field with the response to learn; the loss covers its tokens and the end-of-sequence token."""
    answer_key: str | None = None
    """Field with the reference answer for the `reward` of generated answers; null means `response_key`."""
    prompt_suffix: str = ""
    """Text appended to every question."""
    messages_key: str | None = None
    """Field with a whole conversation (chat messages, those of tools and with `tool_calls` too) in place of prompt and response;
    the loss covers what the assistant says (docs/before_ppo.md)."""
    turns: Literal["all", "last"] = "all"
    """Turns of the assistant in a conversation that are learned."""
    tools_key: str | None = None
    """Field with the tools of a conversation, a list of JSON schemas for the chat template."""
    tokens_key: str | None = None
    """Field with token ids, used as they are, in place of prompt and response."""
    mask_key: str | None = None
    """Field with a 0 or 1 for each of those ids: those to learn; null learns all but the first."""


class TextDistillationConfig(Section):
    """Learn the teacher's distribution at every token that is learned (docs/before_ppo.md)."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """KL(teacher || policy), KL(policy || teacher), or Jensen and Shannon's mean of both against their mixture."""
    top_k: Positive = 64
    """Likeliest tokens of the teacher that are compared one by one; all others are one event."""
    coef: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Weight of the divergence; the rest of 1 is that of the negative log-likelihood of the texts."""


class SftConfig(SupervisedConfig):
    """Configuration of `megappo sft`."""

    command = "sft"
    unit = "demonstration"

    kind: Literal["sft"] = "sft"
    """Kind of run, by which every command knows a file of `megappo sft`."""
    run: RunConfig = RunConfig(name="sft")
    """Name, place and processes of the run."""
    policy: PolicyConfig
    """The model that is fine-tuned."""
    teacher: TeacherConfig = TeacherConfig()
    """Frozen model whose distributions the policy learns; built if `distillation` is set."""
    data: SftDataConfig
    """Demonstrations and their format."""
    distillation: TextDistillationConfig | None = None
    """Learn from a `teacher` on the demonstrations, which any model or hand may have written."""
    rollout: SamplerConfig | None = None
    """Generate a greedy answer to every held-out prompt when the held-out loss is due, for the `reward` to score
    (docs/before_ppo.md). Of PPO's keys those about the engine, `max_response_tokens` and `stop`."""
    reward: RewardConfig | None = None
    """Score of a generated answer: `eval/score`, or `eval/NAME/mean@1` of a set of `evaluations`."""

    @property
    def has_teacher(self) -> bool:
        return self.distillation is not None

    @property
    def sampler(self) -> SamplerConfig | None:
        return self.rollout


# ------------------------------------------------------------------------------------------------------------ reward models


class PairDataConfig(PicturedDataConfig):
    prompt_key: str = "prompt"
    """Field with the question (a string, or a list of chat messages). Not read where the responses are whole conversations;
    where a record lacks it, its responses begin with it."""
    chosen_key: str = "chosen"
    """Field with the better response: a string, a list of messages that the assistant begins, or a whole conversation."""
    rejected_key: str = "rejected"
    """Field with the worse response, as `chosen_key`."""
    prompt_suffix: str = ""
    """Text appended to every question."""


class RewardDataConfig(PairDataConfig):
    margin_key: str | None = None
    """Field with a number that the two scores should differ by at least (arXiv:2307.09288)."""
    tie_key: str | None = None
    """Field that is true if neither response is better (needs `loss.tie_margin`)."""
    responses_key: str | None = None
    """Field with a list of responses, the best one first, in place of `chosen_key` and `rejected_key`."""


class LearnedRewardConfig(TrainableConfig):
    model: ModelPath
    """Checkpoint that the reward model starts from, a directory or a name on the hub; a policy's or a classifier's."""
    value_head: Literal["zero", "normal", "checkpoint"] = "zero"
    """Initial head: zeros, normal(0, 1/(hidden+1)), or that of `model` (`score.weight`)."""


class RankingLossConfig(Section):
    centring: NonNegativeFloat = 0.0
    """Weight of the square of a pair's summed scores, which keeps them near 0 (arXiv:2312.09244); 0.01 is usual."""
    tie_margin: PositiveFloat | None = None
    """Difference of scores up to which two responses are about as often a tie as not: log of Rao and Kupper's threshold
    (arXiv:2410.05328)."""


class RewardTrainingConfig(SupervisedConfig):
    """Configuration of `megappo train-reward-model`."""

    command = "train-reward-model"
    unit = "preference"
    sequences = 2
    learner = "reward_model"
    figures = ("loss", "accuracy", "margin", "calibration_error")

    kind: Literal["reward_model"] = "reward_model"
    """Kind of run, by which every command knows a file of `megappo train-reward-model`."""
    run: RunConfig = RunConfig(name="reward_model")
    """Name, place and processes of the run."""
    reward_model: LearnedRewardConfig
    """The model that learns to score."""
    data: RewardDataConfig
    """Preferences and their format."""
    loss: RankingLossConfig = RankingLossConfig()
    """Likelihood of the preferences: Bradley and Terry's of pairs, Plackett and Luce's of longer lists."""


# --------------------------------------------------------------------------------------------------------------------- dpo


_WITHOUT_REFERENCE = ("simpo", "orpo")


class SigmoidLossConfig(Section):
    """DPO (arXiv:2305.18290)."""

    type: Literal["sigmoid"] = "sigmoid"
    beta: PositiveFloat = 0.1
    """Weight of the distance from the reference."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a label is wrong (conservative DPO)."""
    logprob: Literal["sum", "mean"] = "sum"
    """Log-prob of a response: of all its tokens, or of one on average."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the chosen responses' mean negative log-prob per token (arXiv:2404.19733)."""


class IpoLossConfig(Section):
    """IPO (arXiv:2310.12036)."""

    type: Literal["ipo"]
    beta: PositiveFloat = 0.1
    """The log-ratios of a pair are to differ by 1 / (2 beta)."""
    logprob: Literal["sum", "mean"] = "mean"
    """Log-prob of a response: of all its tokens, or of one on average."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the chosen responses' mean negative log-prob per token."""


class KtoLossConfig(Section):
    """KTO (arXiv:2402.01306), of single responses with a label."""

    logprob: ClassVar = "sum"
    nll_coef: ClassVar = 0.0
    type: Literal["kto"]
    beta: PositiveFloat = 0.1
    """Weight of the distance from the reference."""
    desirable_weight: PositiveFloat = 1.0
    """Weight of desirable responses; desirable_weight x their number should be 1 to 1.33 times that of the others."""
    undesirable_weight: PositiveFloat = 1.0
    """Weight of undesirable responses."""


class SimpoLossConfig(Section):
    """SimPO (arXiv:2405.14734), of mean log-probs and without a reference."""

    logprob: ClassVar = "mean"
    type: Literal["simpo"]
    beta: PositiveFloat = 2.0
    """Factor of the mean log-probs."""
    gamma: NonNegativeFloat = 1.0
    """Margin that beta times their difference is to have."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Probability that a label is wrong."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of the chosen responses' mean negative log-prob per token."""


class OrpoLossConfig(Section):
    """ORPO (arXiv:2403.07691), without a reference."""

    logprob: ClassVar = "mean"
    type: Literal["orpo"]
    beta: PositiveFloat = 0.1
    """Weight of the odds ratio."""
    nll_coef: NonNegativeFloat = 1.0
    """Weight of the chosen responses' mean negative log-prob per token."""


PreferenceLossConfig = SigmoidLossConfig | IpoLossConfig | KtoLossConfig | SimpoLossConfig | OrpoLossConfig


class DpoDataConfig(PairDataConfig):
    response_key: str = "completion"
    """Field with a single response, for KTO."""
    label_key: str = "label"
    """Field that is true (1) if that response is desirable, false (0) if not."""


class DpoReferenceConfig(FrozenConfig):
    model: ModelPath | None = None
    """Checkpoint of the reference; null means `policy.model`, the policy as it starts."""
    every_step: bool = False
    """Compute the reference's log-probs in every step by a model beside the policy; false: once, before the first step, and
    kept with the prepared data."""


class DpoConfig(SupervisedConfig):
    """Configuration of `megappo dpo`."""

    command = "dpo"
    unit = "preference"
    sequences = 2
    figures = ("loss", "accuracy", "margin", "chosen", "rejected")

    kind: Literal["dpo"] = "dpo"
    """Kind of run, by which every command knows a file of `megappo dpo`."""
    run: RunConfig = RunConfig(name="dpo")
    """Name, place and processes of the run."""
    policy: PolicyConfig
    """The model that learns."""
    reference: DpoReferenceConfig = DpoReferenceConfig()
    """Frozen model that the policy is compared with."""
    data: DpoDataConfig
    """Preferences and their format."""
    loss: Annotated[PreferenceLossConfig, Field(discriminator="type")] = SigmoidLossConfig()
    """Loss of a pair, or of a response with a label."""

    @property
    def reads_reference(self) -> bool:
        """True if the loss compares the policy with its reference."""
        return self.loss.type not in _WITHOUT_REFERENCE

    @property
    def has_reference(self) -> bool:
        if not self.reads_reference:
            return False
        return self.reference.every_step or self.reference.model is not None or self.policy.lora is not None


AnyConfig = TrainConfig | SupervisedConfig
"""Configuration of a run."""
KINDS: dict[str, type[SupervisedConfig]] = {
    one.model_fields["kind"].default: one for one in (SftConfig, RewardTrainingConfig, DpoConfig)
}
"""Kind -> its configuration."""


def command_of(cls: type[AnyConfig]) -> str:
    """Name of the command whose files a class reads."""
    return cls.command if issubclass(cls, SupervisedConfig) else "train"
