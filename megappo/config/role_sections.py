"""Keys of the roles: models, layouts, optimizers, offload. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, Field

from megappo.config.paths import ModelPath, PathIfThere
from megappo.config.rank_ranges import ALL, RankRanges
from megappo.config.section import Decay, Fraction, LossAggregation, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

AVERAGE = "ema"  # name of the policy's moving average among the models of a checkpoint, and of --role


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor-parallel size: every weight matrix is cut over this many ranks."""
    pp: Positive = 1
    """Pipeline-parallel size: the layers are cut into this many stages (1F1B schedule)."""
    vpp: Positive = 1
    """Model chunks of each pipeline stage (interleaved 1F1B: a smaller bubble, more communication). Needs pp > 1;
    micro-batches are raised to a multiple of pp."""
    cp: Positive = 1
    """Context-parallel size: the tokens of every sequence are cut over this many ranks, in zig-zag order."""
    ep: Positive = 1
    """Expert-parallel size: the experts of a layer are spread over this many of a stage's tp * cp * dp ranks."""
    etp: Positive = 1
    """Tensor-parallel size of each expert, independent of tp (Megatron-core's own default is tp)."""
    sequence_parallel: bool = False
    """Shard the activations between the matrix products over the tp ranks too. Models with experts need it with tp > 1."""
    layers_per_stage: tuple[Positive, ...] = ()
    """Layers of each of the pp * vpp stages in the order of the model (chunk 0 of every stage, then chunk 1); empty splits
    evenly."""


class ConstantLRConfig(Section):
    type: Literal["constant"] = "constant"


class DecayingLRConfig(Section):
    type: Literal["linear", "cosine"]
    min_ratio: Fraction = 0.0
    """Share of `lr` that the last optimizer step of the run has."""


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decays of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices (never of norms and biases)."""
    clip_grad: NonNegativeFloat = 1.0
    """Global gradient norm above which gradients are scaled down; 0: no clipping."""
    lr_schedule: Annotated[ConstantLRConfig | DecayingLRConfig, Field(discriminator="type")] = ConstantLRConfig()
    """Shape of the learning rate after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up from 0."""
    distributed: bool = True
    """Shard fp32 main parameters and moments over data-parallel ranks (Megatron-core's distributed optimizer, ZeRO-1)."""

    @property
    def min_lr(self) -> float:
        """Learning rate at the end of a schedule that decays; 0 for a constant one, which does not read it."""
        return self.lr * self.lr_schedule.min_ratio if isinstance(self.lr_schedule, DecayingLRConfig) else 0.0


Offload = Literal["parameters", "gradients", "optimizer"]


class RoleConfig(Section):
    engine: Literal["megatron", "fsdp2"] = "megatron"
    """Megatron-core (every layout), or transformers' classes under FSDP2 (dp, tp, cp; docs/engines.md). Roles may differ."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Type of weights and activations; main parameters and gradient sums are fp32 either way."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout of the role over its ranks; what tp, cp and pp leave is data parallel."""
    ranks: RankRanges = ALL
    """Ranks of the role: `all`, or increasing ranges such as `0-47`, `0-15,32-47` or `3` (docs/layouts.md)."""
    compile: bool = False
    """torch.compile every layer at its first passes, which takes a minute or more; engine fsdp2 without tp."""
    micro_batch_tokens: Positive = 16384
    """Token budget of a packed micro-batch of a data-parallel rank (shared by its cp ranks); a longer sequence is one of its
    own."""

    @property
    def in_8_bits(self) -> bool:
        """True if the linear layers keep their weights in 8 bits."""
        return False

    @property
    def may_offload(self) -> tuple[Offload, ...]:
        """Words that `offload` of this role takes, in the order of a device's memory."""
        return ("parameters",)


class LoraConfig(Section):
    """Low-rank adapters (arXiv:2106.09685): the model is frozen, and each adapted layer trains two small matrices A and B."""

    rank: Positive = 16
    """Rank of the change that an adapted layer can learn."""
    alpha: PositiveFloat = 32.0
    """The change is alpha / rank * B A; twice the rank is usual. rsLoRA's a / sqrt(rank) (arXiv:2312.03732) is alpha = a *
    sqrt(rank)."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability of dropping an input of A in training; PPO's ratios then differ from 1 before the first update."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Endings of layer names in the checkpoint (`[q_proj, v_proj]`), or all-linear: the decoder layers' linear layers,
    those of every expert too. Embeddings, output projection, norms and routers have no adapters."""
    base_bits: Literal[8] | None = None
    """8 keeps the frozen linear layers in 8 bits (docs/engines.md; dense models of a family); null keeps them in `dtype`."""


class TrainableConfig(RoleConfig):
    lora: LoraConfig | None = None
    """Train low-rank adapters on a frozen model, and a critic's value head in full (docs/engines.md)."""
    freeze: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Weights that do not train, by parts of their names: `[embed_tokens, layers.0-15, mlp.down_proj]`
    (docs/algorithms.md)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    recompute: Literal["none", "selective", "full", "offload"] = "none"
    """Recompute in the backward pass: core attention (selective), every layer (full), every layer with its input in host
    memory (offload, fsdp2 only)."""
    reduce_once: bool = False
    """Reduce gradients once a pass instead of after each micro-batch, as megatron always does; fsdp2 needs more memory for it
    (docs/engines.md)."""
    router_aux_coef: NonNegativeFloat = 0.0
    """Weight of the routers' balancing loss per sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17-20), for models with
    experts."""
    router_bias_rate: NonNegativeFloat = 0.0
    """Step of an expert's correction towards an even load after every optimizer step (the same, section 2.1.2); 0 keeps the
    corrections as they are."""
    offload: tuple[Offload, ...] = ()
    """State that leaves the GPU while other roles work: parameters and optimizer (fp32 main parameters, moments) go to host
    memory, gradients are freed."""

    @property
    def in_8_bits(self) -> bool:
        return self.lora is not None and self.lora.base_bits is not None

    @property
    def recomputed(self) -> Literal["none", "selective", "full"]:
        """Parts of the model that the backward pass computes again; offload is full, with the inputs elsewhere."""
        return "full" if self.recompute == "offload" else self.recompute

    @property
    def may_offload(self) -> tuple[Offload, ...]:
        return get_args(Offload)


class EmaConfig(Section):
    """Exponential moving average of the policy's weights, in fp32, in checkpoints too (docs/algorithms.md)."""

    decay: Decay = 0.992
    """After every PPO step: average = decay * average + (1 - decay) * weights."""


class PolicyConfig(TrainableConfig):
    model: ModelPath
    """Directory of a Hugging Face checkpoint (config.json, safetensors), or a name on the hub (`owner/name`,
    `owner/name@revision`), downloaded once."""
    logits_dtype: Literal["fp32", "bf16"] = "fp32"
    """Rounding of the logits behind the log-probs of policy and reference: none, or as a sampler in bf16 rounds
    (docs/agreement.md)."""
    ema: EmaConfig | None = None
    """Moving average of the weights (docs/algorithms.md)."""


class MSELossConfig(Section):
    """Half the squared error."""

    type: Literal["mse"] = "mse"
    clip: PositiveFloat | None = 0.2
    """Clip new values to this distance from the old ones."""


class HuberLossConfig(Section):
    """The squared error with a bounded gradient."""

    type: Literal["huber"] = "huber"
    delta: PositiveFloat = 1.0
    """Error from which on the loss is linear."""
    clip: PositiveFloat | None = 0.2
    """Clip new values to this distance from the old ones."""


class CategoricalLossConfig(Section):
    """Cross-entropy of probabilities of bins, with the return as a normal distribution (hl_gauss, arXiv:2403.03950) or shared
    by the two nearest bins (two_hot)."""

    type: Literal["hl_gauss", "two_hot"]
    bins: Annotated[int, Field(ge=2)] = 51
    """Number of bins; the value is the mean of their centres."""
    low: float
    """Low end of the bins; a lower return counts as this (`critic/return_outside`)."""
    high: float
    """High end of the bins."""


ValueLossConfig = MSELossConfig | HuberLossConfig | CategoricalLossConfig


class AnyCriticConfig(TrainableConfig):
    """A critic. The warm-up is in `CriticConfig`: all critics share it."""

    model: ModelPath | None = None
    """Checkpoint that initialises the critic, a reward or critic model's head included; null means `policy.model`."""
    value_head: Literal["zero", "normal", "checkpoint"] = "zero"
    """Initial value head: zeros, normal(0, 1/(hidden+1)), or that of `model` (`score.weight` or `v_head.weight`)."""
    checkpoint: PathIfThere | None = None
    """megappo run (`runs/NAME`: its newest checkpoint) or checkpoint (`runs/NAME/checkpoints/step-N`) whose weights start the
    critic, of any layout and engine; `model` still names the architecture."""
    checkpoint_role: Annotated[str, Field(pattern=r"^(policy|critic(_[A-Za-z0-9]+)?)$")] = "critic"
    """Role of `checkpoint` to load: `critic`, `critic_NAME` of `critics.NAME`, or the policy under a new head
    (`value_head`)."""
    ppo_epochs: Positive | None = None
    """The critic's passes over the responses of a step; null means `algorithm.ppo_epochs`."""
    mini_batch_size: Positive | None = None
    """Samples per optimizer step of the critic; null means `algorithm.mini_batch_size` / number of critics."""
    loss_aggregation: LossAggregation | None = None
    """Reduction of the critic's token losses; null means `algorithm.loss_aggregation`."""
    loss: Annotated[ValueLossConfig, Field(discriminator="type")] = MSELossConfig()
    """Loss of the values (docs/algorithms.md)."""

    @property
    def head_rows(self) -> int:
        """Number of outputs of the value head."""
        return self.loss.bins if isinstance(self.loss, CategoricalLossConfig) else 1

    @property
    def head_facts(self) -> dict[str, str | int | float] | None:
        """Keys that give the outputs of a categorical head their meaning; None for a head that predicts the value itself."""
        return self.loss.model_dump() if isinstance(self.loss, CategoricalLossConfig) else None


class WarmupConfig(Section):
    """PPO steps at the start of a run that train only the critic."""

    steps: Positive
    """Number of these steps. As many as `trainer.steps` only pretrain the critic (`megappo pretrain-critic`)."""
    lam: Fraction | None = None
    """GAE lambda of the critic's returns in these steps, 1 for Monte Carlo (arXiv:2503.01491); null means
    `algorithm.lam_value`."""
    explained_variance: Annotated[float, Field(lt=1.0)] | None = None
    """End these steps after the first whose `critic/explained_variance` (the least of several critics) reaches this; the
    policy's learning-rate schedule then counts all steps of the run."""
    trajectories: PathIfThere | None = None
    """Run (`runs/NAME`) whose trajectories are read in place of sampling (`megappo pretrain-critic --trajectories`,
    docs/algorithms.md)."""


class CriticConfig(AnyCriticConfig):
    warmup: WarmupConfig | None = None
    """Steps at the start that train the critic alone."""

    @property
    def warmup_steps(self) -> int:
        return 0 if self.warmup is None else self.warmup.steps

    @property
    def warmup_trajectories(self) -> str | None:
        return None if self.warmup is None else self.warmup.trajectories


class ModelConfig(Section):
    """Implementation of the layers of all roles."""

    impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """TransformerEngine's layers, or Megatron-core's own (local) with torch attention; auto: the former on a GPU that has
    it."""


class FrozenConfig(RoleConfig):
    offload: tuple[Literal["parameters"], ...] = ()
    """`[parameters]` moves the weights to host memory while other roles work."""


class RefreshConfig(Section):
    every: Positive | None = None
    """PPO steps between copies."""
    above_kl: PositiveFloat | None = None
    """Copy after a step whose `kl/per_response`, in nats, exceeds this."""
    source: Literal["policy", "ema"] = "policy"
    """Weights to copy: the policy's, or their moving average (`policy.ema`)."""


class ReferenceConfig(FrozenConfig):
    model: ModelPath | None = None
    """Checkpoint of the reference; null means `policy.model`, and with `policy.lora` the policy without its adapters: no
    second model, and the other keys of this section have no effect."""
    refresh: RefreshConfig | None = None
    """Copy the policy into the reference during the run (ProRL, arXiv:2505.24864)."""


class TeacherConfig(FrozenConfig):
    model: ModelPath | None = None
    """Checkpoint of the teacher, with the policy's tokenizer; it may be of another family and size."""


class RewardModelConfig(FrozenConfig):
    model: ModelPath | None = None
    """Sequence classifier with one label (`LlamaForSequenceClassification` and its like), a directory or a name on the hub,
    for a part `{model: reward_model}`."""
    tokenizer: ModelPath | None = None
    """Its tokenizer: a directory, a name on the hub, or a SentencePiece .model file; null means `model`."""
    chat_template: bool = True
    """Show it prompt and response by its own tokenizer's chat template; false: their texts one after the other."""
    center: float = 0.0
    """Subtracted from the model's number, such as its mean over the first policy's responses."""
    scale: PositiveFloat = 1.0
    """Divides the centred number, such as its standard deviation."""
    clip: PositiveFloat | None = None
    """Bound of the scaled number on both sides."""


# --------------------------------------------------------------------------------------------------- sections by role

_FURTHER = "critic_"
Config = TypeVar("Config", bound=BaseModel)


def is_critic(role: str) -> bool:
    """True for the role `critic` and for further ones, `critic_NAME` of the section `critics.NAME`."""
    return role == "critic" or role.startswith(_FURTHER)


def key_of_role(role: str) -> str:
    """Dotted key of a role's section: `critics.b` for the role `critic_b`, otherwise the role's own name."""
    return f"critics.{role.removeprefix(_FURTHER)}" if role.startswith(_FURTHER) else role


def further_role(name: str) -> str:
    return _FURTHER + name


def section_of(config: Any, role: str) -> Any:
    """Section of a role (a `RoleConfig`), or another section by its name."""
    return config.critics[role.removeprefix(_FURTHER)] if role.startswith(_FURTHER) else getattr(config, role)


def with_sections(config: Config, sections: Mapping[str, Any]) -> Config:
    """Copy the configuration with these sections, given by role or by name, in place of its own."""
    further = {role.removeprefix(_FURTHER): one for role, one in sections.items() if role.startswith(_FURTHER)}
    update = {name: one for name, one in sections.items() if not name.startswith(_FURTHER)}
    if further:
        update["critics"] = {**vars(config)["critics"], **further}
    return config.model_copy(update=update)
