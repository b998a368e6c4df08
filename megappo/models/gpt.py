"""Policy and critic: Megatron-core's GPTModel with a packed-batch forward and the output that PPO needs.

Neither computes logits: the policy returns hidden states and its output weight (the log-prob op chunks the tokens), the critic one
fp32 value per token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from megappo.data.images import ImageStore
from megappo.data.packing import moved
from megappo.models.arch import ModelArch, padded_vocab
from megappo.models.attention import PackedSequences, packed_sequences
from megappo.models.vision import Deferred, Seen, features_of, placed, positions_of, seen_in, tower_of
from megappo.parallel.context import ContextShard


class PackedModel(GPTModel):
    """GPTModel with a forward over a packed batch; the subclass defines the output of the last stage."""

    def __init__(
        self,
        arch: ModelArch,
        config: TransformerConfig,
        layers: TransformerBlockSubmodules,
        groups: ProcessGroupCollection,
        pre_process: bool,
        post_process: bool,
        tied_embeddings: bool,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(
            config,
            cast(Any, layers),  # Megatron takes a block's submodules too, its types a ModuleSpec only
            vocab_size=padded_vocab(arch, config.tensor_model_parallel_size),
            max_sequence_length=arch.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=tied_embeddings,
            position_embedding_type="none",  # positions enter in the core attention
            pg_collection=groups,
            vp_stage=vp_stage,
            # Features of images come among the embeddings of all tokens.
            scatter_embedding_sequence_parallel=arch.vision is None,
        )
        self.arch = arch
        self.images: ImageStore | None = None
        """Images that the tokens of a vision-language model name; None: they name none."""
        if pre_process and arch.vision is not None:
            device = None if config.use_cpu_initialization else torch.cuda.current_device()
            self.visual = tower_of(arch.vision, config.params_dtype, device)
            for number in range(arch.vision.deepstack):
                self.decoder.layers[number].register_forward_hook(partial(_add_features, number), with_kwargs=True)
        if pre_process and arch.embedding_scale != 1.0:
            self.embedding.register_forward_hook(self._scaled)

    def _scaled(self, _module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor:
        """Scale embeddings, by the factor as transformers and vLLM round it."""
        return output * torch.tensor(self.arch.embedding_scale, dtype=output.dtype)

    # Megatron's arguments are those of a padded batch.
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        context: ContextShard | None = None,
        real: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states for the next stage, or the last stage's output, from tokens [T] int64 and cu_seqlens [B+1].

        context: this rank's part of the tokens under context parallel; every rank of the group passes all T. Inner shapes are [T /
        cp / tp, 1, H]: T must be a multiple of cp x tp under sequence parallel. real: [real tokens] int64 positions of the tokens
        that are not padding (experts are balanced over these); None if all are real. routes: of all T, as in `PackedSequences`.
        """
        vision, axes, seen = self.arch.vision, None, None
        if vision is not None:
            on_host = tokens.cpu()
            axes = positions_of(on_host, cu_seqlens, self.images) if vision.sections else None
            seen = seen_in(on_host, self.images)
        packed = packed_sequences(self.arch, cu_seqlens, tokens.device, self.config.params_dtype, context, axes)
        packed.real = real
        if routes is not None:
            routes = routes if context is None else context.take(routes)
            tp: Any = self.tp_group if self.config.sequence_parallel else None
            packed.routes = routes if tp is None else routes.chunk(tp.size())[tp.rank()]
        start: Any = None  # Megatron's types leave out its default
        if seen is not None and self.pre_process:
            start = self._with_images(seen, tokens, context, packed)
        mine = tokens if context is None else context.take(tokens)
        absent: Any = None  # positions and the mask are in `packed`
        return super().forward(
            input_ids=mine[None], position_ids=absent, attention_mask=absent, packed_seq_params=packed, decoder_input=start
        )

    def _with_images(self, seen: Seen, tokens: Tensor, context: ContextShard | None, packed: PackedSequences) -> Tensor:
        """Embed the tokens, with the features of images in their places: [T / cp / tp, 1, H]. `packed` gets those of later layers.

        Every tp and cp rank computes the features of all images, and each cp rank's tokens give them a part of their gradient.
        """
        assert self.arch.vision is not None
        rows = moved(seen.rows, tokens.device)
        words = tokens.masked_fill(rows >= 0, self.arch.vision.image_token)
        if context is not None:
            words, rows = context.take(words), context.take(rows)
        embedded: Tensor = self.embedding(input_ids=words[None], position_ids=None)
        if not seen.images:
            return self._own_tokens(embedded)
        assert self.images is not None
        features = features_of(self.visual, self.images, seen.images, self.config.params_dtype)
        first, later = placed(features, rows, embedded[:, 0])
        embedded, *added = (self._own_tokens(one[:, None]) for one in (first, *later))
        if not added:
            return embedded
        packed.late = [one.detach().requires_grad_(one.requires_grad) for one in added]
        deferred = Deferred.apply(packed.late, embedded, *added)
        assert isinstance(deferred, Tensor)
        return deferred

    def _own_tokens(self, x: Tensor) -> Tensor:
        # The backward gathers: each tp rank has the whole gradient of the embedding and of all features.
        return scatter_to_sequence_parallel_region(x, group=self.tp_group) if self.config.sequence_parallel else x


def _add_features(number: int, _layer: object, _inputs: object, inputs: Mapping[str, Any], output: Any) -> Any:
    late: Sequence[Tensor] = inputs["packed_seq_params"].late
    if not late:
        return output
    hidden, *others = output
    return (hidden + late[number], *others)


class PolicyModel(PackedModel):
    """Language model. The last stage returns final hidden states of this rank's tokens, [T / cp, 1, H].
    Under sequence parallel they are [T / cp / tp, 1, H]."""

    # Megatron passes many arguments by name; only the hidden states are used.
    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return hidden_states

    def output_weight(self) -> Tensor:
        """Output weight [padded vocabulary / tp, H] of this rank, on the last stage; the embedding if tied."""
        assert self.post_process
        return self.embedding.word_embeddings.weight if self.output_layer.weight is None else self.output_layer.weight


class CriticModel(PackedModel):
    """Value model. The last stage returns V [T] fp32 after every token, on every tp and cp rank, not shifted.
    The head is a replicated fp32 Linear(H, rows); a categorical one gives [T, rows]. Embeddings are untied for any checkpoint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # With tied embeddings the pipeline would wait for a gradient of the output weight, which a value model lacks.
        super().__init__(*args, tied_embeddings=False, **kwargs)
        if self.post_process:
            del self.output_layer
            device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
            sizes = self.config.hidden_size, self.arch.head_rows
            self.value_head = torch.nn.Linear(*sizes, bias=False, device=device, dtype=torch.float32)
            torch.nn.init.zeros_(self.value_head.weight)  # until `hf_import.fill_value_head`
            # Each tp rank sees its part of the tokens only: finalize_model_grads sums the partial gradients.
            setattr(self.value_head.weight, "sequence_parallel", self.config.sequence_parallel)

    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor,
        context: ContextShard | None = None,
        real: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        output = super().forward(tokens, cu_seqlens, context, real, routes)
        return context.gather(output) if self.post_process and context is not None else output

    # Megatron passes many arguments by name; only the hidden states are used.
    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.post_process:
            return hidden_states
        values = self.value_head(hidden_states.float()).squeeze((1, 2))  # of the one sequence, of the one output
        if self.config.sequence_parallel:
            # Every tp rank computes the same loss from all values, so the backward takes this rank's slice without a sum.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self.tp_group)
        return values


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_SEQUENTIAL_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")  # TransformerEngine's grouped GEMM


def named_parameters(chunks: Sequence[PackedModel]) -> dict[str, torch.nn.Parameter]:
    """Canonical name -> parameter of this rank, over its model chunks (not wrapped)."""
    named = {name: parameter for chunk in chunks for name, parameter in _canonical(chunk)}
    assert len(named) == sum(1 for chunk in chunks for _ in chunk.parameters()), "two chunks hold the same layer"
    return named


def _canonical(chunk: PackedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for name, parameter in chunk.named_parameters():
        match = _LAYER.match(name)
        if match is None:
            yield name, parameter
            continue
        layers: Any = chunk.decoder.layers
        layer = layers[int(match[1])]
        inside = match[2]
        if ".lora." in inside:
            adapter: Any = layer.get_submodule(inside.rpartition(".")[0])
            yield f"{adapter.module}.{inside.rpartition('.')[2]}.weight", parameter  # as PEFT names it
            continue
        if inside.startswith("mlp.experts."):
            inside = expert_name(inside, layer.mlp.local_expert_indices[0])
        yield f"decoder.layers.{layer.layer_number - 1}.{inside}", parameter  # Megatron counts layers from 1


def expert_name(inside: str, first: int) -> str:
    """Canonical name of an expert's tensor, from its name inside its layer in either implementation.
    first: number of this rank's first expert. ValueError for any other name."""
    if match := _SEQUENTIAL_EXPERT.match(inside):
        local, tensor = int(match[1]), match[2]
    elif match := _GROUPED_EXPERT.match(inside):
        local, tensor = int(match[2]), match[1]
    else:
        raise ValueError(f"{inside} is not a tensor of an expert")
    return f"mlp.experts.local_experts.{first + local}.{tensor}"
