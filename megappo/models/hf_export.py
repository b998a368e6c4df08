"""Export of a model as a Hugging Face checkpoint: safetensors shards, index, config and tokenizer files.

Each pipeline stage writes its own shards, gathering one tensor at a time on its first rank, so host memory stays at one shard. The
architecture alone decides the file of each tensor, so the index needs no communication.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megappo.config.run_directory import open_to_readers_of
from megappo.data.tokenizers import Tokenizer, eos_ids_of
from megappo.models.arch import ModelArch
from megappo.models.families.registry import FAMILIES
from megappo.models.fp8 import SCALE_SUFFIX
from megappo.models.gather import Gather, on_all_ranks
from megappo.models.gpt import CriticModel, PackedModel
from megappo.models.hf_config import read_config, text_config
from megappo.models.hf_tensors import CheckpointReader, place_in_stack
from megappo.models.lora import Weights
from megappo.models.lora_linear import merged_parameters
from megappo.models.peft_files import ADAPTER_FOLDER, AdapterTensors, write_adapter
from megappo.models.pieces import Piece
from megappo.models.vision_families import VISION_FAMILIES, checkpoint_name
from megappo.models.weight_check import further_layers_of
from megappo.models.weight_map import VALUE_HEAD, constants, hf_tensors, megatron_pieces, piece_map
from megappo.models.weight_rules import CORRECTION
from megappo.parallel.groups import ProcessGroups
from megappo.parallel.layout import ParallelLayout
from megappo.runtime.messages import parse_object

# Size of a file, which its writer holds in host memory.
_SHARD_BYTES = 4 << 30
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_GENERATION = "generation_config.json"
_IMAGES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
# Files of tokenizers; weights and remote code are never copied.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SCORE_BIAS = "score.bias"


@dataclass(frozen=True)
class Shard:
    """One file and its tensors, written by pipeline stage `stage`."""

    file: str
    stage: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Written:
    """A model as its export describes it: weights of `arch` in `dtype`; a critic (`value_head`) becomes a token classifier, or a
    sequence classifier if its head scores texts."""

    arch: ModelArch
    dtype: torch.dtype
    value_head: bool


def plan_shards(
    arch: ModelArch, layout: ParallelLayout, value_head: bool, itemsize: int, shard_bytes: int = _SHARD_BYTES
) -> list[Shard]:
    """Assign every tensor to a file. The first stage that holds a tensor writes it."""
    shapes = hf_tensors(arch, value_head)
    written: set[str] = set()
    parts: list[tuple[int, list[str]]] = []
    for stage in range(layout.pp):
        size = shard_bytes + 1  # full: the stage's first tensor opens a file
        tensors: dict[str, list[str]] = {}  # as written -> those that it is made of
        for name in shapes if arch.own else _names_of_stage(arch, layout, stage, value_head):
            if name not in written:
                tensors.setdefault(_written_name(name, arch), []).append(name)
        for names in tensors.values():
            written.update(names)
            tensor_bytes = sum(math.prod(shapes[name]) for name in names) * itemsize
            if size + tensor_bytes > shard_bytes:
                parts.append((stage, []))
                size = 0
            parts[-1][1].extend(names)
            size += tensor_bytes
    assert written == set(shapes), sorted(set(shapes) - written)
    if value_head and not arch.scores_texts:
        parts[-1][1].append(_SCORE_BIAS)  # transformers' token classifiers have a bias; ours is always 0
    if len(parts) == 1:
        return [Shard("model.safetensors", 0, tuple(parts[0][1]))]
    total = len(parts)
    return [Shard(f"model-{i:05d}-of-{total:05d}.safetensors", stage, tuple(names)) for i, (stage, names) in enumerate(parts, 1)]


def _names_of_stage(arch: ModelArch, layout: ParallelLayout, stage: int, value_head: bool) -> Iterable[str]:
    # One rank of each stage is enough: its pieces name every tensor of the stage.
    stages = ParallelLayout(layout.pp, pp=layout.pp, vpp=layout.vpp, layers_per_stage=layout.layers_per_stage)
    held = {piece.hf for piece in megatron_pieces(arch, stages, stage, value_head)}
    return [name for name in hf_tensors(arch, value_head) if name in held]


def export_pretrained(
    chunks: Sequence[PackedModel],
    arch: ModelArch,
    groups: ProcessGroups,
    out_dir: str | Path,
    source_dir: str | Path,
    tokenizer: Tokenizer | None = None,
    adapter: AdapterTensors | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a Megatron model (its chunks, not wrapped) to `out_dir` in its own dtype, as `export_pieces` does."""
    model = Written(arch, chunks[0].config.params_dtype, isinstance(chunks[0], CriticModel))
    pieces = _pieces_of_stage(arch, groups, model.value_head)
    options = {"tokenizer": tokenizer, "adapter": adapter, "shard_bytes": shard_bytes}
    export_pieces(merged_parameters(chunks), pieces, model, groups, out_dir, source_dir, **options)


def export_pieces(
    parameters: Weights,
    pieces: Mapping[int, Sequence[Piece]],
    model: Written,
    groups: ProcessGroups,
    out_dir: str | Path,
    source_dir: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    adapter: AdapterTensors | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a model as a Hugging Face checkpoint. Collective over the role's ranks.

    parameters: of this rank. pieces: position -> its rectangles, for positions of this rank's stage that together hold all of it,
    the first one among them. adapter: also written for PEFT, to a folder inside. A critic's head is written in fp32. `source_dir`
    gives config.json and generation settings. tokenizer: the one that it was trained with, which may be another than that in
    `source_dir`; its ids end a response of the export too. None copies the files in `source_dir`. `out_dir` must not exist and
    appears when it is complete. ValueError or OSError on every rank if one fails.
    """
    if model.value_head and model.arch.vision is not None and not model.arch.scores_texts:
        raise ValueError(f"a critic of {model.arch.architecture} is not exported: transformers has no such class with a value head")
    out, partial = Path(out_dir), Path(f"{out_dir}.partial")
    shards = plan_shards(model.arch, groups.layout, model.value_head, model.dtype.itemsize, shard_bytes)
    gather, is_first = Gather(parameters, pieces, hf_tensors(model.arch, model.value_head), groups), groups.position == 0
    on_all_ranks(lambda: _start(out, partial) if is_first else None, groups)
    on_all_ranks(lambda: _write_stage(gather, groups, partial, shards, model), groups)
    if adapter is not None:
        on_all_ranks(lambda: write_adapter(adapter, groups, partial / ADAPTER_FOLDER, Path(source_dir), tokenizer), groups)

    def finish() -> None:
        files = {_written_name(name, model.arch): shard.file for shard in shards for name in shard.names}
        if not model.value_head:
            files |= _pass_further_layers(Path(source_dir), partial, model, shard_bytes)
        config = export_config(model, read_config(source_dir), None if tokenizer is None else tokenizer.pad_id)
        _finish(out, partial, Path(source_dir), files, config, tokenizer)

    on_all_ranks(lambda: finish() if is_first else None, groups)


def _pieces_of_stage(arch: ModelArch, groups: ProcessGroups, value_head: bool) -> dict[int, list[Piece]]:
    # One position of this stage for each part of its weights: dp and cp ranks hold copies.
    layout = groups.layout
    root = layout.rank_of(pp=groups.coordinates.pp)
    whole, ranks = piece_map(arch, layout, value_head), range(root, root + layout.ranks_per_stage)
    first = {(at.tp, at.etp, at.ep): rank for rank in reversed(ranks) if (at := layout.coordinates(rank))}
    return {rank: whole[rank] for rank in sorted(first.values())}


def _start(out: Path, partial: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists; export to another directory or remove it")
    if partial.exists():  # left by an export that was interrupted
        shutil.rmtree(partial)
    partial.mkdir(parents=True)  # renamed at the end: a directory under the final name is always complete


def _write_stage(gather: Gather, groups: ProcessGroups, folder: Path, shards: list[Shard], model: Written) -> None:
    failure: Exception | None = None
    in_fp32 = {VALUE_HEAD, _SCORE_BIAS, *constants(model.arch)}
    for shard in shards:
        if shard.stage != groups.coordinates.pp:
            continue
        tensors = {}
        for name in shard.names:
            kept = torch.float32 if name in in_fp32 else model.dtype
            whole = torch.zeros(model.arch.head_rows, dtype=kept) if name == _SCORE_BIAS else gather(name, kept)
            if whole is not None:
                tensors[name] = whole
        if gather.is_root and failure is None:
            try:
                save_file(_as_written(tensors, model.arch), folder / shard.file, metadata={"format": "pt"})
                open_to_readers_of(folder, folder / shard.file)
            except (OSError, SafetensorError) as error:
                failure = error  # the peers still send the rest: receive it, then report
    if failure is not None:
        raise failure


def _written_name(name: str, arch: ModelArch) -> str:
    """Return the tensor of a checkpoint of this architecture that holds the one of this text-only name."""
    if arch.vision is None:
        return name
    place = place_in_stack(name) if VISION_FAMILIES[arch.architecture].stacked else None
    return checkpoint_name(name if place is None else place.stack)


def _as_written(tensors: dict[str, Tensor], arch: ModelArch) -> dict[str, Tensor]:
    """Spell text-only names as a checkpoint of this architecture does, and join the matrices of experts. Empties `tensors`."""
    found: dict[str, Tensor] = {}
    while tensors:
        name, tensor = tensors.popitem()
        written, place = _written_name(name, arch), place_in_stack(name)
        if written in (name, checkpoint_name(name)):
            found[written] = tensor
            continue
        assert place is not None and arch.moe is not None
        rows, columns = tensor.shape
        if written not in found:
            found[written] = tensor.new_empty(arch.moe.num_experts, columns, rows if place.part == "down" else 2 * rows)
        first = rows if place.part == "up" else 0
        found[written][place.expert, :, first : first + rows] = tensor.T
    return found


def _pass_further_layers(source: Path, partial: Path, model: Written, shard_bytes: int) -> dict[str, str]:
    """Copy the layers of a checkpoint that predict further tokens, which nothing trains. Return tensor -> file."""
    if not (further_layers := further_layers_of(source, model.arch)) or not any(source.glob("*.safetensors")):
        return {}
    reader, files, held = CheckpointReader(source), {}, {}

    def write() -> None:
        file = f"further-layers-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(held, partial / file, metadata={"format": "pt"})
        open_to_readers_of(partial, partial / file)
        files.update(dict.fromkeys(held, file))
        held.clear()

    for name, shape in reader.unread(hf_tensors(model.arch)).items():
        if name.startswith(further_layers) and not name.endswith(SCALE_SUFFIX):
            kept = torch.float32 if name.endswith(CORRECTION.name) else model.dtype
            held[name] = reader.slice(name, shape)[0][:].to(kept)
            if sum(tensor.nbytes for tensor in held.values()) >= shard_bytes:
                write()
    if held:
        write()
    return files


def _finish(
    out: Path, partial: Path, source: Path, files: Mapping[str, str], config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> None:
    if len(set(files.values())) > 1:
        index = {"metadata": {}, "weight_map": dict(files)}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(partial)
    for name in (_GENERATION, *(_IMAGES if "vision_config" in config else ()), *(_TOKENIZER if tokenizer is None else ())):
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    if tokenizer is not None:
        _end_with(partial / _GENERATION, tokenizer.eos_ids)
    partial.rename(out)


def _end_with(file: Path, eos_ids: Sequence[int]) -> None:
    """Make generation settings end a response at the ids of the training: transformers and vLLM read them there."""
    settings = parse_object(file.read_bytes(), str(file)) if file.exists() else {}
    if set(eos_ids_of(settings)) != set(eos_ids):
        settings["eos_token_id"] = list(eos_ids)
        file.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _whole_config(model: Written, source: Mapping[str, Any], pad_id: int | None) -> dict[str, Any]:
    """Make config.json of an exported vision-language model, in the source's own form."""
    config = {key: value for key, value in source.items() if key != "quantization_config"}
    for part in (config, *(config[key] for key in ("text_config", "vision_config") if key in config)):
        for key in {"dtype", "torch_dtype"} & part.keys() or {"dtype"}:
            part[key] = _DTYPE_NAMES[model.dtype]
    if model.value_head:
        config["architectures"] = [VISION_FAMILIES[model.arch.architecture].classifier]
        config |= _head_keys(model, text_config(source), pad_id)
    return config


def _head_keys(model: Written, text: Mapping[str, Any], pad_id: int | None) -> dict[str, Any]:
    """Return the keys of config.json that a value head needs. text: those of the text-only model."""
    labels = ["VALUE"] if model.arch.head_rows == 1 else [f"BIN_{row}" for row in range(model.arch.head_rows)]
    names = {str(row): label for row, label in enumerate(labels)}
    keys: dict[str, Any] = {"id2label": names, "label2id": {label: row for row, label in enumerate(labels)}}
    if model.arch.scores_texts and text.get("pad_token_id") is None:
        keys["pad_token_id"] = pad_id  # without one, transformers finds no end of a text in a batch
    return keys


def export_config(model: Written, source: Mapping[str, Any], pad_id: int | None = None) -> dict[str, Any]:
    """Make config.json of the exported text-only model from the config it was trained from. pad_id: of the tokenizer."""
    arch, config = model.arch, text_config(source)
    if arch.vision is not None:
        return _whole_config(model, source, pad_id)
    of_head = "SequenceClassification" if arch.scores_texts else "TokenClassification"
    head = of_head if model.value_head else "CausalLM"
    # Without a family `architecture` is the language model's, whatever the source's own head.
    known = arch.family in FAMILIES
    config["architectures"] = [
        FAMILIES[arch.family].architecture(head) if known else arch.architecture.removesuffix("CausalLM") + head
    ]
    # The key has two names, and some files have both, with two values.
    config.update(dict.fromkeys({"dtype", "torch_dtype"} & config.keys() or {"dtype"}, _DTYPE_NAMES[model.dtype]))
    if arch.own:  # explicit: a composite's default may be another than its language model's
        config["tie_word_embeddings"] = arch.tied_embeddings
    for key in ("num_labels", "id2label", "label2id"):
        config.pop(key, None)
    if arch.rope.llama_4_scaling is not None:
        config["llama_4_scaling"] = arch.rope.llama_4_scaling  # for vLLM
    if model.value_head:
        config |= _head_keys(model, config, pad_id)
    return config
