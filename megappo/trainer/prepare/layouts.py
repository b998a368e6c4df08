"""Checks that every role's model fits its layout; every rule names key, value and fix. Reads config.json and the headers of the
weight files, never weights. Rules for any model: `config/layout_checks.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import gcd

from megappo.config.batch import nearest_divisors, step_arithmetic
from megappo.config.errors import ConfigError, about, problem
from megappo.config.layout_checks import head_rows_of, roles_in_use, value_head_of
from megappo.config.role_sections import (
    AnyCriticConfig,
    ParallelConfig,
    RewardModelConfig,
    RoleConfig,
    TrainableConfig,
    key_of_role,
    section_of,
)
from megappo.config.schema import TrainConfig
from megappo.config.supervised import AnyConfig
from megappo.config.supervised_step import sampling_config
from megappo.models import weight_check
from megappo.models.arch import ModelArch, check_cp, check_ep, check_tp
from megappo.models.families.registry import FAMILIES
from megappo.models.freeze import check_frozen_stages, frozen_of
from megappo.models.hf_config import arch_for
from megappo.models.implementation import Implementation, implementation_of_role
from megappo.parallel.layout import ParallelLayout, layout_of, placement_of
from megappo.rollout.vllm_limits import cut_sizes, kv_heads_fit
from megappo.trainer.prepare.reward_model import check_classifier, check_head

_SHOWN = 3  # tensors that a note names


def model_problems(section: str, parallel: ParallelConfig, arch: ModelArch, implementation: Implementation) -> Iterator[str]:
    """Yield the sizes that the model does not allow, one line each. section: such as `policy.parallel`."""
    try:
        check_tp(arch, parallel.tp)
    except ValueError as error:
        yield problem(f"{section}.tp", parallel.tp, str(error))
        return  # the rules below divide by tp
    yield from _layer_problems(section, parallel, arch.num_layers)
    try:
        check_cp(arch, parallel.tp, parallel.cp, implementation)
    except ValueError as error:
        yield problem(f"{section}.cp", parallel.cp, str(error))
    yield from _expert_problems(section, parallel, arch)


def fsdp2_problems(key: str, section: RoleConfig, arch: ModelArch) -> Iterator[str]:
    """Yield what a role's layout would cut of its model that engine fsdp2 does not cut, one line each. key: of the section."""
    if section.engine != "fsdp2":
        return
    tp, cp = section.parallel.tp, section.parallel.cp
    megatron = f", or {key}.engine to megatron" if arch.family in FAMILIES else ""
    if arch.own and tp > 1:
        fix = f"no tensor parallel plan for {arch.family} under fsdp2; set tp to 1{megatron}"
        yield problem(f"{key}.parallel.tp", tp, fix)
    elif arch.num_kv_heads % tp:
        does_not = f"does not divide the {arch.num_kv_heads} KV heads of this {arch.family} model, which fsdp2 does not copy"
        largest = gcd(arch.num_kv_heads, arch.ffn_size)
        fix = f"{does_not}; the largest tp that works is {largest}, or set {key}.engine to megatron"
        yield problem(f"{key}.parallel.tp", tp, fix)
    if arch.delta is not None and cp > 1:
        fix = f"the delta nets of this {arch.family} model pass their sequence in order, and fsdp2 cuts none; set cp to 1{megatron}"
        yield problem(f"{key}.parallel.cp", cp, fix)


def _layer_problems(section: str, parallel: ParallelConfig, layers: int) -> Iterator[str]:
    pp, vpp, given = parallel.pp, parallel.vpp, parallel.layers_per_stage
    if given:
        if sum(given) != layers:
            fix = f"adds up to {sum(given)} and the model has {layers} layers; change an entry, or leave it out for an even split"
            yield problem(f"{section}.layers_per_stage", list(given), fix)
        return
    # An uneven split is no way out if there are fewer layers than chunks: every chunk needs one.
    uneven = ", or give an uneven split in layers_per_stage" if pp * vpp <= layers else ""
    if layers % pp:
        yield problem(f"{section}.pp", pp, f"does not divide the {layers} layers into stages; use {_or(layers, pp)}{uneven}")
    elif layers // pp % vpp:
        stage = f"the {layers // pp} layers of a stage ({layers} layers / pp {pp})"
        yield problem(f"{section}.vpp", vpp, f"does not divide {stage} into chunks; use {_or(layers // pp, vpp)}{uneven}")


def _expert_problems(section: str, parallel: ParallelConfig, arch: ModelArch) -> Iterator[str]:
    for axis, ep, etp in (("ep", parallel.ep, 1), ("etp", 1, parallel.etp)):
        try:
            check_ep(arch, ep, etp)
        except ValueError as error:
            yield problem(f"{section}.{axis}", getattr(parallel, axis), str(error))
    if arch.moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        # Without it every tp rank would dispatch the same tokens, and each expert would see them tp times.
        fix = f"tp {parallel.tp} with experts needs it (Megatron-core refuses to train without); set it to true, or tp to 1"
        yield problem(f"{section}.sequence_parallel", False, fix)


def _or(number: int, wanted: int) -> str:
    return " or ".join(map(str, nearest_divisors(number, wanted)))


def model_paths(config: AnyConfig) -> dict[str, tuple[str, str]]:
    """Return role -> (key that names its checkpoint, path), for the roles that are built."""
    paths: dict[str, tuple[str, str]] = {}
    for role in roles_in_use(config):
        of = role if section_of(config, role).model is not None else config.learner
        paths[role] = f"{key_of_role(of)}.model", section_of(config, of).model
    return paths


def model_of_tokenizer(config: AnyConfig) -> str:
    """Return the model whose tokenizer a run has by default: the policy's, or that of the role that learns."""
    return section_of(config, config.learner).model


def read_archs(config: AnyConfig) -> dict[str, ModelArch]:
    """Return role -> architecture of its checkpoint. ConfigError, with the key, for one that is missing or unsupported."""
    archs: dict[str, ModelArch] = {}
    for role, (key, path) in model_paths(config).items():
        section: RoleConfig = section_of(config, role)
        with about(key, path):
            archs[role] = arch_for(path, section.engine, head_rows_of(section))
            if isinstance(section, RewardModelConfig):
                check_classifier(path)
    return archs


def check_weights(config: AnyConfig, archs: Mapping[str, ModelArch]) -> tuple[str, ...]:
    """Compare what every role reads with the headers of its weight files; return notes on tensors that are left out. ConfigError,
    with the key, for files that cannot be read and for tensors that are missing or of another shape. Imports no torch."""
    notes = []
    for role, (key, path) in model_paths(config).items():
        section: RoleConfig = section_of(config, role)
        with about(key, path):
            if isinstance(section, RewardModelConfig):
                check_head(path, archs[role].hidden_size)
            with _own_head(role):
                left_out = weight_check.check_headers(path, archs[role], value_head_of(section))
        if left_out.others:
            shown = ", ".join(left_out.others[:_SHOWN]) + (", ..." if len(left_out.others) > _SHOWN else "")
            what = f"{len(left_out.others)} of its tensors are left out, as a {archs[role].family} model has none of that name"
            notes.append(f"{key}: {what}: {shown}; if the model needs them, its config.json is of another one")
        if left_out.head is not None and isinstance(section, AnyCriticConfig) and section.checkpoint is None:
            head = f"{key_of_role(role)}.value_head"
            notes.append(
                f"{key}: its {left_out.head} is left out, as {head} is {section.value_head}; {head}=checkpoint starts from it"
            )
    return tuple(dict.fromkeys(notes))  # roles share models


def check_values(config: AnyConfig, archs: Mapping[str, ModelArch]) -> None:
    """ConfigError, with the key, for values that the import refuses (`weight_check.check_values`)."""
    for role, (key, path) in model_paths(config).items():
        with about(key, path), _own_head(role):
            weight_check.check_values(path, archs[role], value_head_of(section_of(config, role)))


@contextmanager
def _own_head(role: str) -> Iterator[None]:
    """Name the role's key in an error about a value head, whose fix is the critic's."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error).replace("critic.value_head", f"{key_of_role(role)}.value_head")) from error


def check_layouts(
    config: AnyConfig, archs: Mapping[str, ModelArch], world_size: int, implementation: Implementation = "local"
) -> dict[str, ParallelLayout]:
    """Check every role's layout against its model and return role -> layout over its own ranks. ConfigError, one line with key,
    value and fix. The sizes and ranks fit the world (`layout_checks.world_problems`). implementation: of the run's layers; `local`
    has the stricter rules."""
    layouts: dict[str, ParallelLayout] = {}
    for role, parallel in roles_in_use(config).items():
        section, arch = section_of(config, role), archs[role]
        layouts[role] = layout_of(parallel, len(placement_of(section.ranks, world_size)))
        layers = implementation_of_role(implementation, config.model.impl, section)
        # Attention is ours under fsdp2 too, and under cp exchanges tokens for heads.
        _check_role(key_of_role(role), section, arch, layouts[role], "local" if section.engine == "fsdp2" else layers)
    if isinstance(config, TrainConfig):
        # A reward model reads text, so neither the policy's vocabulary nor its sequence lengths apply.
        of_tokens = {role: arch for role, arch in archs.items() if not isinstance(section_of(config, role), RewardModelConfig)}
        if "policy" in archs:
            _check_rollout(config, archs["policy"])
        _check_lengths(config, of_tokens)
        _check_vocabularies(of_tokens)
        return layouts
    for role, arch in archs.items():
        if config.data.max_tokens > arch.max_positions:
            _too_long("data.max_tokens", config.data.max_tokens, role, arch)
    if (sampled := sampling_config(config)) is not None:
        _check_rollout(sampled, archs["policy"])
    _check_vocabularies(archs)
    return layouts  # no rule for vocabularies and tp: they are padded to a multiple of tp


def _check_role(key: str, section: RoleConfig, arch: ModelArch, layout: ParallelLayout, layers: Implementation) -> None:
    """ConfigError if a role's section does not fit its model. key: of the section. layers: whose rules apply."""
    for message in fsdp2_problems(key, section, arch):
        raise ConfigError(message)
    if section.compile and arch.moe is not None:
        fix = f"torch.compile does not take the experts of this {arch.family} model, whose sizes depend on the tokens; remove it"
        raise ConfigError(problem(f"{key}.compile", True, fix))
    for message in model_problems(f"{key}.parallel", section.parallel, arch, layers):
        raise ConfigError(message)
    # Only if model.impl names it: auto takes Megatron-core's layers for fp32.
    if layers == "transformer_engine" and section.parallel.cp > 1 and section.dtype == "fp32":
        fix = "TransformerEngine has no context parallelism in fp32; set model.impl=auto, or the role's dtype to bf16"
        raise ConfigError(problem(f"{key}.parallel.cp", section.parallel.cp, fix))
    if layers == "transformer_engine" and section.in_8_bits:
        fix = "TransformerEngine's layers have no weights in 8 bits; set model.impl=auto, or remove it"
        raise ConfigError(problem(f"{key}.lora.base_bits", 8, fix))
    first = len(layout.chunk_layers(arch.num_layers, 0, 0))
    if arch.vision is not None and first < arch.vision.deepstack:
        has = f"the first {'stage' if layout.vpp == 1 else 'chunk'} has {first} layers, and features of images"
        fix = f"{has} enter the first {arch.vision.deepstack}; lower pp or vpp, or set layers_per_stage"
        raise ConfigError(problem(f"{key}.parallel.pp", layout.pp, fix))
    if isinstance(section, TrainableConfig):
        _check_training(key, section, arch, layout)


def _check_training(key: str, section: TrainableConfig, arch: ModelArch, layout: ParallelLayout) -> None:
    if section.router_aux_coef > 0 and arch.moe is None:
        fix = f"has no effect: it balances experts and this {arch.family} model has none; remove it"
        raise ConfigError(problem(f"{key}.router_aux_coef", section.router_aux_coef, fix))
    if section.router_bias_rate > 0 and (section.lora is not None or arch.moe is None or not arch.moe.sigmoid):
        of = "adapters leave the corrections of a model" if section.lora else f"this {arch.family} model has no corrections"
        raise ConfigError(problem(f"{key}.router_bias_rate", section.router_bias_rate, f"has no effect: {of}; remove it"))
    if section.lora is not None:
        from megappo.models.lora import adapted_modules, tensors_to_adapt  # imports torch
        from megappo.models.lora_shards import check_stages

        if section.in_8_bits and (arch.own or arch.moe is not None or arch.delta is not None):
            which = "has delta nets" if arch.delta is not None and arch.moe is None else "is none"
            fix = f"weights in 8 bits are of dense models of a family, and this {arch.family} model {which}; remove it"
            raise ConfigError(problem(f"{key}.lora.base_bits", 8, fix))
        with about(f"{key}.lora.targets", section.lora.targets):
            modules = adapted_modules(tensors_to_adapt(arch), section.lora.targets)
            if not arch.own:  # whose engine has no pipeline
                check_stages(arch, layout, modules)
    if section.freeze:
        head = value_head_of(section) is not None
        with about(f"{key}.freeze", list(section.freeze)):
            check_frozen_stages(arch, layout, frozen_of(section, arch, value_head=head), value_head=head)


def _check_rollout(config: TrainConfig, arch: ModelArch) -> None:
    """ConfigError if `rollout.tp` does not divide the sizes that vLLM shards. Other limits of vLLM: `rollout/vllm_limits.py`."""
    tp = config.rollout.tp
    if config.rollout.engine != "vllm":
        return
    if config.rollout.adapter == "separate" and (arch.keeps_scores or arch.family not in FAMILIES or arch.vision is not None):
        model = arch.family if arch.vision is None else arch.architecture
        fix = f"vLLM's names of the layers of this {model} model are not known; set it to merged"
        raise ConfigError(problem("rollout.adapter", config.rollout.adapter, fix))
    if config.rollout.adapter == "separate" and (arch.latent is not None or arch.delta is not None):
        of = "latent attention" if arch.delta is None else "delta nets"
        fix = f"vLLM fuses the projections of this {arch.family} model's {of}, or absorbs them; set it to merged"
        raise ConfigError(problem("rollout.adapter", config.rollout.adapter, fix))
    if config.rollout.adapter == "separate" and (lora := config.policy.lora) is not None and arch.moe is not None:
        from megappo.models.lora import adapted_modules, expert_of, tensors_to_adapt  # imports torch

        if any(map(expert_of, adapted_modules(tensors_to_adapt(arch), lora.targets))):
            fix = "no push fills vLLM's LoRA layers of experts; set it to merged, or leave experts out of policy.lora.targets"
            raise ConfigError(problem("rollout.adapter", config.rollout.adapter, fix))
    for what, size in cut_sizes(arch):
        if size % tp:
            raise ConfigError(problem("rollout.tp", tp, f"does not divide the {size} {what} of policy.model; use {_or(size, tp)}"))
    if not kv_heads_fit(arch, tp):
        fix = f"and the {arch.num_kv_heads} KV heads of policy.model: neither divides the other; use {_or(arch.num_kv_heads, tp)}"
        raise ConfigError(problem("rollout.tp", tp, fix))


def _check_lengths(config: TrainConfig, archs: Mapping[str, ModelArch]) -> None:
    longest = step_arithmetic(config).max_sequence_tokens
    for role, arch in archs.items():
        if longest > arch.max_positions:
            room = arch.max_positions - config.data.max_prompt_tokens  # left for the response
            if room < 1:
                _too_long("data.max_prompt_tokens", config.data.max_prompt_tokens, role, arch)
            sequence = f"with data.max_prompt_tokens {config.data.max_prompt_tokens} a sequence has {longest} tokens"
            fix = f"{sequence}, more than the {arch.max_positions} positions of the {role}; use at most {room}"
            raise ConfigError(problem("rollout.max_response_tokens", config.rollout.max_response_tokens, fix))
    if "policy" not in archs:
        return
    if (ptx := config.algorithm.ptx) is not None and ptx.max_tokens > archs["policy"].max_positions:
        _too_long("algorithm.ptx.max_tokens", ptx.max_tokens, "policy", archs["policy"])
    room = archs["policy"].max_positions - config.data.max_prompt_tokens  # the others see no evaluation
    for name, one in config.evaluations.items():
        if (one.max_response_tokens or 0) > room:
            fix = f"the policy has {archs['policy'].max_positions} positions, and a prompt may have {config.data.max_prompt_tokens}"
            key = f"evaluations.{name}.max_response_tokens"
            raise ConfigError(problem(key, one.max_response_tokens, f"{fix}; use at most {room}"))


def _too_long(key: str, tokens: int, role: str, arch: ModelArch) -> None:
    raise ConfigError(problem(key, tokens, f"the {role} has {arch.max_positions} positions; use fewer tokens"))


def _check_vocabularies(archs: Mapping[str, ModelArch]) -> None:
    """ConfigError if a role cannot read the policy's tokens. Without a policy, `recorded.py` checks the trajectories' tokens."""
    if "policy" not in archs:
        return
    wanted = archs["policy"].vocab_size
    for role, arch in archs.items():
        # The KL compares the policy's distribution with the reference's entry by entry.
        same = arch.vocab_size == wanted if role == "reference" else arch.vocab_size >= wanted
        if not same:
            raise ConfigError(
                f"{key_of_role(role)}.model: its vocabulary has {arch.vocab_size} tokens and the policy's {wanted}; "
                "use a checkpoint of the same vocabulary"
            )
