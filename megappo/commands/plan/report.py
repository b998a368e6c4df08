"""Plan as text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from math import prod

from megappo.checkpoint.interval import best_interval_s, expected_mtbf_hours
from megappo.commands.plan.estimate import (
    Plan,
    feature_bytes,
    ids_of_token,
    route_bytes,
    samples_of_pass,
    sequences_at_once,
    work_out,
)
from megappo.commands.plan.memory import RoleMemory
from megappo.commands.plan.phases import phases, remedies, tightest
from megappo.commands.plan.tower import shown_by_keys
from megappo.config.batch import WHOLE, StepArithmetic, text_arithmetic, update_schedule
from megappo.config.layout_checks import reference_is_base, trained_sections, value_head_of
from megappo.config.rank_ranges import ranges_text
from megappo.config.role_sections import LoraConfig, section_of
from megappo.models.arch import ModelArch
from megappo.models.freeze import frozen_of
from megappo.models.lora import shapes_beside_base
from megappo.models.weight_map import VALUE_HEAD, hf_tensors
from megappo.parallel.layout import ParallelLayout, Placement, ranks_by_roles
from megappo.runtime.messages import name_ranks
from megappo.telemetry.tables import GIB, MIB, figures, gib, groups_text, ranks_text, table
from megappo.trainer.prepare.layouts import model_paths
from megappo.trainer.prepare.recorded import RecordedData, describe
from megappo.trainer.prepare.run import AnyData
from megappo.trainer.prepare.supervised import SupervisedData
from megappo.trainer.prepare.supervised import describe as describe_examples

GROUPS_WIDTH = 64  # columns of a line that groups of ranks may take beside the sizes


def report(plan: Plan, data: AnyData | None = None, notes: Sequence[str] = ()) -> str:
    blocks = [
        ["models", *_model_lines(plan)],
        ["ranks", *_rank_lines(plan)],
        _memory_lines(plan),
        phase_lines(plan),
        ["batch", *_batch_lines(plan)],
        ["checkpoints", *_checkpoint_lines(plan)],
    ]
    if data is not None:
        blocks.append(["data", *_data_lines(plan, data)])
    blocks += [remarks] if (remarks := remark_lines(plan, notes)) else []
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def brief(plan: Plan, data: AnyData, notes: Sequence[str], command: str) -> str:
    """Plan of a run that starts: ranks, the fullest rank's memory, batches and data. command: prints the whole one."""
    layouts = ", ".join(f"{role} {layout}" for role, layout in plan.layouts.items())
    batch = _batch_lines(plan)[: 1 + len({update_schedule(plan.config, role) for role in trained_sections(plan.config)})]
    models = [
        f"  {role}: {plan.archs[role].family} of {sum(_parameters(plan, role).values()):,} parameters, {layout} on "
        f"{layout.world_size} ranks"
        for role, layout in (plan.layouts.items() if plan.is_supervised else ())
    ]
    lines = [
        f"plan (all of it: {command})",
        *(models or [f"  {plan.world_size} ranks on {plan.device}: {layouts}", f"  {_rollout_ranks(plan)}"]),
        f"  memory of the fullest rank: {_fullest(plan)}",
        *batch,
        *_data_lines(plan, data),
    ]
    return "\n".join([*lines, *remark_lines(plan, notes)]) + "\n"


def _unit(plan: Plan) -> tuple[int, str]:
    """Unit of the tables of memory, in bytes, and its name."""
    return (GIB, "GiB") if plan.peak(plan.fullest_rank()) >= GIB else (MIB, "MiB")


def _fullest(plan: Plan) -> str:
    rank, (unit, name) = plan.fullest_rank(), _unit(plan)
    have = f" of {plan.device_memory / unit:,.2f}" if plan.device_memory is not None else ""
    return f"about {plan.peak(rank) / unit:,.2f}{have} {name} at its peak (rank {rank})"


def remark_lines(plan: Plan, notes: Sequence[str]) -> list[str]:
    """The notes and warnings below a heading; empty if there are none."""
    remarks = [f"  note: {note}" for note in notes] + [f"  WARNING: {warning}" for warning in plan.warnings]
    return ["remarks", *remarks] if remarks else []


def _parameters(plan: Plan, role: str) -> dict[str, int]:
    """Hugging Face tensor of a role -> its number of elements."""
    shapes = hf_tensors(plan.archs[role], value_head_of(section_of(plan.config, role)) is not None)
    return {name: prod(shape) for name, shape in shapes.items()}


def _beside_base(plan: Plan, role: str, lora: LoraConfig) -> dict[str, int]:
    """Tensor that trains beside a frozen base -> its number of elements."""
    shapes = shapes_beside_base(plan.archs[role], lora, value_head_of(section_of(plan.config, role)) is not None)
    return {name: prod(shape) for name, shape in shapes.items()}


def _model_lines(plan: Plan) -> list[str]:
    paths, rows = model_paths(plan.config), []
    for role in paths:
        arch, parameters = plan.archs[role], sum(_parameters(plan, role).values())
        sizes = [str(arch.num_layers), str(arch.hidden_size), f"{arch.num_heads} / {arch.num_kv_heads}", _ffn_text(arch)]
        rows.append([role, arch.family, f"{parameters:,}", *sizes, f"{arch.vocab_size:,}"])
    lines = table(["role", "family", "parameters", "layers", "hidden", "heads / KV", "ffn", "vocab"], rows, left=2)
    lines += [f"  {role}: {path}" for role, (_, path) in paths.items()]
    compiled = [role for role in paths if section_of(plan.config, role).compile]
    lines += [f"  {role}: layers are compiled at their first passes, which take a minute or more" for role in compiled]
    for role, section in trained_sections(plan.config).items():
        if section.lora is not None:
            beside = sum(_beside_base(plan, role, section.lora).values())
            bits = f" with its linear layers in {section.lora.base_bits} bits" if section.in_8_bits else ""
            lines.append(f"  {role}: trains {beside:,} parameters beside a frozen model{bits} (lora.rank {section.lora.rank})")
        if frozen := _frozen(plan, role):
            sizes_of = _parameters(plan, role)
            away, whole = sum(sizes_of[name] for name in frozen), sum(sizes_of.values())
            lines.append(f"  {role}: {away:,} parameters are frozen ({', '.join(section.freeze)}), {whole - away:,} train")
    if reference_is_base(plan.config):
        lines.append("  reference: the policy without its adapters")
    for role, critic in plan.config.critics_in_use.items():
        if critic.checkpoint is not None:
            lines.append(f"  {role}: starts from the {critic.checkpoint_role} in {critic.checkpoint}")
    return lines


def _ffn_text(arch: ModelArch) -> str:
    """Columns of the MLP; with experts `2 of 8 x 96`: experts per token, experts per layer, columns of each."""
    return str(arch.ffn_size) if arch.moe is None else f"{arch.moe.top_k} of {arch.moe.num_experts} x {arch.moe.ffn_size}"


def _rank_lines(plan: Plan) -> list[str]:
    layouts = plan.layouts
    extra = [axis for axis in ("vpp", "cp", "ep", "etp") if any(getattr(layout, axis) > 1 for layout in layouts.values())]
    axes = ["tp", "pp", "dp", *extra]
    grouped = [axis for axis in axes if axis != "vpp"]  # chunks lie on the same rank
    sizes = [[role, *(_size(layout, axis) for axis in axes)] for role, layout in layouts.items()]
    groups = [[_groups(layout, plan.placements[role], axis) for axis in grouped] for role, layout in layouts.items()]
    header = ["role", *axes]
    lines = [f"  {plan.world_size} ranks on {plan.device}"]
    if not extra and sum(max(map(len, column)) for column in zip(*groups)) <= GROUPS_WIDTH:
        rows = [size + group for size, group in zip(sizes, groups)]
        lines += table([*header, *(f"{axis} groups" for axis in grouped)], rows, left=7)
    else:  # groups below each role, where columns of them would be too wide
        lines += table(header, sizes, left=len(header))
        lines += [
            f"  {role:9} {axis:3} {text}" for role, row in zip(layouts, groups) for axis, text in zip(grouped, row) if text != "-"
        ]
    return [*lines, *_split_lines(plan), *_placement_lines(plan), f"  {_rollout_ranks(plan)}", *_ahead_lines(plan)]


def _size(layout: ParallelLayout, axis: str) -> str:
    return str(getattr(layout, axis)) + (" sp" if axis == "tp" and layout.sequence_parallel else "")


def _groups(layout: ParallelLayout, placement: Placement, axis: str) -> str:
    return groups_text([placement.ranks_of(group) for group in layout.axis_groups(axis)]) if getattr(layout, axis) > 1 else "-"


def _placement_lines(plan: Plan) -> Iterator[str]:
    """Ranks of every role if any is on a part of them, and the roles that run at the same time."""
    if all(placement.is_whole for placement in plan.placements.values()):
        return
    for role in plan.layouts:
        placement = plan.placements[role]
        yield f"  {role}: on ranks {placement}" if not placement.is_whole else f"  {role}: on all ranks"
    if apart := [f"{a} and {b}" for a, b in combinations(plan.layouts, 2) if not plan.placements[a].overlaps(plan.placements[b])]:
        yield f"  at the same time in passes and updates, for they share no rank: {', '.join(apart)}"


def _split_lines(plan: Plan) -> Iterator[str]:
    """Layers of every stage and chunk, for roles with `layers_per_stage`."""
    for role, layout in plan.layouts.items():
        if layout.layers_per_stage:
            layers = plan.archs[role].num_layers
            stages = (
                " + ".join(str(len(layout.chunk_layers(layers, stage, chunk))) for chunk in range(layout.vpp))
                for stage in range(layout.pp)
            )
            yield f"  {role}: layers of the stages {' | '.join(stages)}"


def _rollout_ranks(plan: Plan) -> str:
    if not plan.samples:
        return "no rollout: the examples are given" if plan.is_supervised else "no rollout: the trajectories are recorded"
    what = "held-out answers" if plan.is_supervised else "rollout"
    if plan.rollout is None:
        return f"{what} by megatron: the policy's own shards, {plan.replicas} data-parallel parts"
    tp = plan.config.rollout.tp
    ranks = plan.placements["rollout"].ranks
    replicas = [ranks[start : start + tp] for start in range(0, len(ranks), tp)]
    count = "1 replica" if plan.replicas == 1 else f"{plan.replicas} replicas"
    return f"{what} by vllm: {count} of tp {tp} on ranks {groups_text(replicas)}"


def _ahead_lines(plan: Plan) -> Iterator[str]:
    """Lines on the ranks that train meanwhile and on what is in flight, with `rollout.max_staleness`."""
    ahead = plan.config.rollout.max_staleness
    if ahead is not None and plan.samples:
        training = name_ranks(range(plan.placements["rollout"].ranks[0]))
        responses = plan.step.samples * (ahead + 1)
        tokens = responses * plan.config.rollout.max_response_tokens
        yield f"  meanwhile {training} train; in flight (rollout.max_staleness {ahead}) are at most"
        yield f"  {_count(ahead + 1, 'step')}: {responses:,} responses of {tokens:,} tokens"


def in_flight_bytes(plan: Plan) -> int:
    """Most bytes of the files of a checkpoint with what responses of later steps have drawn, those of all replicas together."""
    config = plan.config.rollout
    ahead = config.max_staleness or 0
    kept = ids_of_token(plan.config)
    of_token = 8 + (4 + 4 * kept if kept else 0)  # id, log-prob, and ids that it was drawn from, with their number
    named = 128 + 46 * (ahead + 1)  # in JSON, with a segment of each version
    routes = plan.step.max_sequence_tokens * route_bytes(plan.config, plan.archs.get("policy"))
    return ahead * plan.step.samples * (config.max_response_tokens * of_token + named + routes)


def _memory_lines(plan: Plan) -> list[str]:
    rank, (unit, name) = plan.fullest_rank(), _unit(plan)

    def size(value: int) -> str:
        return f"{value / unit:,.2f}"

    rows = []
    for role, stages in plan.memory.items():
        for stage, m in _distinct_stages(stages):
            sizes = map(size, (m.weights, m.gradients, m.optimizer, m.activations, m.resident + m.active))
            rows.append([role, stage, f"{m.parameters:,}", *sizes])
    if plan.rollout is not None:
        cache = size(plan.rollout.kv_cache) if plan.rollout.kv_cache is not None else "?"
        rows.append(["rollout", "-", "", size(plan.rollout.weights), "", "", f"KV {cache}", size(plan.rollout_bytes())])
    if held := plan.experience(rank):
        rows.append(["experience", "-", "", "", "", "", "", size(held)])
    if plan.reserve:
        rows.append(["reserve", "-", "", "", "", "", "", size(plan.reserve)])
    have = f" of {size(plan.device_memory)}" if plan.device_memory is not None else ""
    return [
        f"memory of one rank ({name})",
        *table(["role", "stage", "parameters", "weights", "gradients", "optimizer", "activations", "sum"], rows, left=2),
        f"  fullest rank: {rank}, about {size(plan.peak(rank))}{have} at its peak, "
        f"{size(plan.certain(rank))} of it without activations",
        "  activations are an estimate of one role at work; offloaded parts count while their role works",
        *(["  torch's allocator reserves about 6 % over what is alive, which no sum here has"] if plan.device == "cuda" else []),
        *(["  experience: tokens and fields of a step whose responses are all at their longest"] if plan.experience(rank) else []),
        *_image_lines(plan, size, name),
        *_shared_lines(plan, size),
        *(["  reserve: an estimate of what the CUDA context and NCCL's communicators take"] if plan.reserve else []),
        *_host_lines(plan, size, name),
        *_adam_lines(plan),
        *(f"  {line}" for line in _cache_lines(plan)),
    ]


def _image_lines(plan: Plan, size: Callable[[int], str], unit: str) -> Iterator[str]:
    """Lines on the number of images and on the towers' share of the activations; none without images."""
    shown = plan.shown or next((one for arch in plan.archs.values() if (one := shown_by_keys(plan.config, arch))), None)
    if shown is None:
        return
    yield f"  images: up to {shown.tokens:,} tokens of a prompt ({shown.source})"
    towers = {role: stages[0] for role, stages in plan.memory.items() if stages[0].patches}
    yield "  their towers; of one that trains all samples of a micro-batch with other images and short responses:"
    for role, one in towers.items():
        yield f"    {role}: {one.patches:,} patches, which take up to {size(one.tower)} {unit} of its activations"
    replicas = {role: plan.layouts[role].dp for role in towers}
    if plan.device == "cuda" and (kept := feature_bytes(plan.config, plan.archs, replicas, plan.shown)):
        yield f"  features of frozen towers, kept through a step, take up to {size(kept)} {unit} of the experience"


def _shared_lines(plan: Plan, size: Callable[[int], str]) -> Iterator[str]:
    """The peak of each group of ranks that hold the same roles, if there are several groups."""
    groups = ranks_by_roles({name: placement for name, placement in plan.placements.items() if name != "rollout" or plan.rollout})
    distinct = plan.distinct_ranks() if len(groups) > 1 else []
    for names, ranks in groups.items() if len(groups) > 1 else ():
        here = [rank for rank in distinct if rank in ranks]
        peak = max(map(plan.peak, here))
        what = "rank" if len(ranks) == 1 else "ranks"
        yield f"  {what} {ranges_text(ranks)} ({', '.join(names)}): about {size(peak)} at the peak"


def _host_lines(plan: Plan, size: Callable[[int], str], unit: str) -> Iterator[str]:
    """Memory of offloaded parts, of the policy's average and of the copy of an asynchronous save: on GPU machines the host's, on a
    CPU that of the models above."""
    ranks, on_gpu = plan.distinct_ranks(), plan.device == "cuda"

    def of_host(what: str, held: int, where: str = "of pinned host memory a rank") -> str:
        return f"  {what} {gib(held)} GiB {where}, {gib(8 * held)} on a node of 8"

    if on_gpu and (offloaded := max(map(plan.host_memory, ranks))):
        yield of_host("offloaded parts take", offloaded)
    averages = [(one.average, one.average_on_host) for one in plan.memory.get("policy", ())]  # none in a run of critics alone
    on_device, on_host = max(averages, key=sum, default=(0, 0))
    if on_device:
        yield f"  the policy's average takes {size(on_device)} {unit} of that on each of its ranks"
    elif on_host:
        yield of_host("the policy's average takes", on_host, "of host memory on each of its ranks")
    if snapshot := max(map(plan.snapshot_memory, ranks)):
        besides = f"  asynchronous saves take {size(snapshot)} {unit} a rank besides, from the first one on"
        yield of_host("asynchronous saves take", snapshot) if on_gpu else besides


def _adam_lines(plan: Plan) -> Iterator[str]:
    """Memory of torch's AdamW, which the plan counts only for model.impl=local."""
    # model.impl=auto takes TransformerEngine's optimizer if the GPU machine has it, which is unknown here.
    if plan.device != "cuda" or plan.config.model.impl != "auto":
        return
    local = plan.config.model_copy(update={"model": plan.config.model.model_copy(update={"impl": "local"})})
    torchs = work_out(local, plan.archs, plan.layouts, plan.world_size, plan.device, plan.device_memory, plan.shown)
    buffers = max(stage.step_buffers for stages in torchs.memory.values() for stage in stages)
    yield f"  {gib(buffers)} GiB more in optimizer steps without TransformerEngine or Apex; model.impl=local counts them"


def phase_lines(plan: Plan) -> list[str]:
    """Phases of a step on the fullest rank, and remedies for each role's tightest phase."""
    rank, (unit, name) = plan.fullest_rank(), _unit(plan)
    steps = phases(plan, rank)
    fullest = max(steps, key=lambda phase: phase.total)
    rows = [
        [one.name, *(f"{size / unit:,.2f}" for size in (one.rest, one.work, one.total)), "tightest" if one == fullest else ""]
        for one in steps
    ]
    lines = [f"memory of rank {rank} by phase ({name})", *table(["phase", "at rest", "at work", "sum", ""], rows, left=1)]

    advice = []
    for role, (phase, fullest_rank) in tightest(plan).items():
        found = remedies(plan, role) or [None]
        for index, remedy in enumerate(found):
            what = [role, phase.name, str(fullest_rank), f"{phase.total / unit:,.2f}"] if index == 0 else [""] * 4
            advice.append(what + (["-", ""] if remedy is None else [remedy.override, f"{remedy.saved / unit:,.2f}"]))
    header = ["role", "tightest phase", "rank", name, "would relieve it", "by"]
    return lines + table(header, advice, left=("role", "tightest phase", "would relieve it"))


def _distinct_stages(stages: Sequence[RoleMemory]) -> Iterator[tuple[str, RoleMemory]]:
    """Merge neighbouring stages of equal size into one line (`0`, `1-6`, `7`), with the most activations among them."""
    first = 0
    for stage in range(1, len(stages) + 1):
        if stage == len(stages) or _held(stages[stage]) != _held(stages[first]):
            fullest = max(stages[first:stage], key=lambda memory: memory.activations)
            yield ranks_text(range(first, stage)) if stage - first > 1 else str(first), fullest
            first = stage


def _held(memory: RoleMemory) -> tuple[int, ...]:
    return memory.parameters, memory.weights, memory.gradients, memory.optimizer


def _cache_lines(plan: Plan) -> Iterator[str]:
    rollout = plan.rollout
    if rollout is None:
        return
    at_once = sequences_at_once(plan)
    longest = plan.step.max_sequence_tokens
    yield f"KV cache: {figures(rollout.kv_bytes_per_token / 1024)} KiB per token and rank"
    if rollout.kv_cache is None:
        wanted = at_once * longest * rollout.kv_bytes_per_token
        yield f"  {at_once} sequences of {longest:,} tokens run at once and would take {gib(wanted)} GiB"
        return
    tokens = rollout.kv_cache // rollout.kv_bytes_per_token
    # vLLM's own activations and graphs come out of its share too.
    bound = "" if plan.config.rollout.kv_cache_gib is not None or plan.device == "cpu" else "at most "
    yield f"  room for {bound}{tokens:,} tokens = {tokens // longest:,} sequences of {longest:,}; {at_once} run at once"


def _batch_lines(plan: Plan) -> list[str]:
    config, step = plan.config, plan.step
    schedules = {role: update_schedule(config, role) for role in trained_sections(config)}
    sampled = (
        f"{step.prompts:,} prompts x {config.rollout.samples_per_prompt} samples = "
        if plan.samples and not plan.is_supervised
        else ""
    )
    lines = [f"  step: {sampled}{_count(step.samples, 'sample')}, {step.samples * step.max_sequence_tokens:,} tokens at most"]
    for schedule in dict.fromkeys(schedules.values()):
        roles = ", ".join(role for role in schedules if schedules[role] == schedule)
        each = "" if schedule.part == WHOLE else f", of {step.samples // schedule.part.count:,} samples of its own"
        lines.append(
            f"  updates of {roles}: {_count(schedule.mini_batches(step.samples), 'mini-batch')} of {schedule.mini_batch_size:,} "
            f"x {_count(schedule.epochs, 'epoch')} = {_count(schedule.optimizer_steps(step.samples), 'optimizer step')}{each}"
        )
    if (texts := text_arithmetic(config, "policy")).count and "policy" in schedules:
        lines.append(
            f"  algorithm.ptx: {_count(texts.count, 'text')} in each update of the policy, "
            f"{texts.count * texts.max_tokens:,} tokens at most"
        )
    lines += table(
        ["micro-batches", "dp", "sequences each", "token budget", "micro-batches at most", "bubble"],
        list(_micro_rows(plan, step)),
        left=1,
    )
    lines += [
        f"  {role}: raised to a multiple of pp {layout.pp} (vpp {layout.vpp}); where there are fewer sequences, some are empty"
        for role, layout in plan.layouts.items()
        if layout.vpp > 1 and plan.micro_batches[role] % layout.pp
    ]
    at_most = f"  at most: when every sequence has all {step.max_sequence_tokens:,} tokens"
    if "reward_model" in plan.layouts:
        at_most += " of the policy's"  # another tokenizer may make more or fewer of a text
    deep = any(layout.pp > 1 for layout in plan.layouts.values())
    return lines + [at_most + ("; with fewer micro-batches the bubble is larger" if deep else "")]


def _micro_rows(plan: Plan, step: StepArithmetic) -> Iterator[list[str]]:
    for role, layout in plan.layouts.items():
        samples, trains = samples_of_pass(plan.config, role, step), role in trained_sections(plan.config)
        what = f"{role}, {'one mini-batch' if trains else 'all samples'}"
        budget = section_of(plan.config, role).micro_batch_tokens
        waiting = f"{100 * plan.bubble(role):.0f} %" if trains else ""
        each = -(-samples // layout.dp) + -(-text_arithmetic(plan.config, role).count // layout.dp)
        yield [what, str(layout.dp), f"{each:,}", f"{budget:,}", f"{plan.micro_batches[role]:,}", waiting]


def _count(number: int, what: str) -> str:
    plural = what + ("es" if what.endswith("tch") else "s")
    return f"{number:,} {what if number == 1 else plural}"


def _frozen(plan: Plan, role: str) -> frozenset[str]:
    section = section_of(plan.config, role)
    return frozen_of(section, plan.archs[role], value_head=value_head_of(section) is not None)


def checkpoint_bytes(plan: Plan) -> int:
    """Bytes of one checkpoint, without the overhead of its file format."""
    config, total = plan.config, 0
    for role, section in trained_sections(config).items():
        # With adapters those and a value head alone.
        sizes = _parameters(plan, role) if section.lora is None else _beside_base(plan, role, section.lora)
        fp32 = section.dtype == "fp32" or (section.lora is not None and section.engine == "fsdp2")
        frozen = _frozen(plan, role)
        for name, size in sizes.items():
            in_half = not fp32 and name != VALUE_HEAD
            # Two moments in fp32, and the fp32 main parameter of a bf16 one.
            optimizer = 0 if config.checkpoint.save_only_model or name in frozen else 12 if in_half else 8
            total += ((2 if in_half else 4) + optimizer) * size
    return total


def _checkpoint_lines(plan: Plan) -> Iterator[str]:
    settings, size = plan.config.checkpoint, checkpoint_bytes(plan)
    held = "weights" if settings.save_only_model else "weights and optimizers"
    at_once = settings.keep_last + 1 if settings.save_every not in (0, "never") else 1  # one more while it is written
    if plan.config.trainer.keep_best is not None:
        at_once = settings.keep_last + 2  # and the best
    yield f"  about {gib(size)} GiB each: {held} of {' and '.join(trained_sections(plan.config))}; at most {at_once} at once"
    if in_flight := in_flight_bytes(plan):
        yield f"  and at most about {gib(in_flight)} GiB of responses that later steps have begun (rollout-N.bin)"
    if settings.save_every == "auto":
        hours = expected_mtbf_hours(plan.world_size)
        every = ", ".join(f"{figures(best_interval_s(s, hours) / 60)} min if {s} s" for s in (1, 10, 60))
        yield f"  one failure in {figures(hours)} h is expected, so the interval is"
        yield f"  {every} is what a save holds training"
    else:
        words = {0: "one at the end", "epoch": "one after each epoch", "never": "none but at a stop or an error"}
        yield "  " + (words.get(settings.save_every) or f"one every {_count(int(settings.save_every), 'step')}")


def _data_lines(plan: Plan, data: AnyData) -> list[str]:
    if isinstance(data, RecordedData):
        return [f"  {describe(data, plan.step.samples)}"]
    if isinstance(data, SupervisedData):
        return [f"  {line}" for line in describe_examples(data)]
    role = "critic" if "critic" in plan.layouts else "policy"  # the critic's updates are never ended early and run in its warm-up
    schedule = update_schedule(plan.config, role)
    per_epoch, per_step, prompts = data.loader.steps_per_epoch, plan.step.prompts, len(data.train)
    epochs = data.total_steps * per_step / prompts
    over = per_epoch * per_step - prompts
    crossing = f" (its last step takes {over:,} from the next epoch)" if over else ""
    lines = [
        f"  train: {data.train.summary()}",
        f"  epoch: {prompts:,} prompts / {per_step:,} per step = {_count(per_epoch, 'step')}{crossing}",
        f"  run: {_count(data.total_steps, 'step')} = {epochs:.3g} epochs, {data.total_steps * plan.step.samples:,} samples, "
        f"{data.total_steps * schedule.optimizer_steps(plan.step.samples):,} optimizer steps of the {role}",
    ]
    if data.ptx is not None and (texts := plan.config.algorithm.ptx) is not None:
        drawn = data.total_steps * update_schedule(plan.config, "policy").optimizer_steps(plan.step.samples)
        drawn *= texts.batch_size
        passes = f"{drawn:,} drawn = {figures(drawn / len(data.ptx.texts))} passes"
        lines.append(f"  algorithm.ptx: {data.ptx.texts.summary()}; {passes}")
    for one in data.evaluations:
        s = one.settings
        how = f"; {s.n} samples at temperature {s.temperature:g}, every {_count(s.every or 0, 'step')}" if one.name else ""
        lines.append(f"  eval{' ' + one.name if one.name else ''}: {one.prompts.summary()}{how}")
    return lines
