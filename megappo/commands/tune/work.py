"""Cost of one micro-batch on one rank of one pipeline stage: matrix products, memory traffic and communication of its layers. Times
are in seconds, sizes in bytes unless named otherwise.

Links follow from the rank order of `ParallelLayout` (tp fastest, then cp, dp, pp; experts etp, ep, edp) and the ranks per node.
Ring algorithms (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in MPICH"; the "bus
bandwidth" of NCCL's tests) move (n - 1) / n of the data over n ranks, once for an all-gather or a reduce-scatter and twice for an
all-reduce. Small messages take log2 n steps (ibid.: recursive doubling, Bruck; NCCL's trees)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from random import Random
from typing import Any, Literal, NamedTuple

from megappo.commands.plan.activations import ITEMSIZE, layer_elements_per_token
from megappo.commands.plan.memory import FP32
from megappo.config.layout_checks import value_head_of
from megappo.config.role_sections import LoraConfig, RoleConfig
from megappo.models.arch import Kind, ModelArch, VisionArch
from megappo.models.flops import BACKWARD, MULTIPLY_ADD, attention_matrices, attention_products, tower_flops
from megappo.models.lora import adapted_modules, products_per_token, tensors_to_adapt
from megappo.models.vision_families import tower_shape
from megappo.parallel.layout import ParallelLayout, Placement
from megappo.telemetry.hardware import Dtype, Hardware

Axis = Literal["tp", "cp", "gradients", "pp", "etp", "ep", "expert gradients"]


@dataclass(frozen=True)
class Span:
    """Number of ranks of a group, and of those that share a node."""

    size: int
    in_node: int

    @property
    def crosses_nodes(self) -> bool:
        return self.in_node < self.size


def span(layout: ParallelLayout, axis: Axis, ranks_per_node: int) -> Span:
    """Span of rank 0's group. `gradients`: the ranks with the same dense weights (dp x cp); `expert gradients`: edp."""
    stride, size = {
        "tp": (1, layout.tp),
        "cp": (layout.tp, layout.cp),
        "gradients": (layout.tp, layout.cp * layout.dp),
        "pp": (layout.ranks_per_stage, layout.pp),
        "etp": (1, layout.etp),
        "ep": (layout.etp, layout.ep),
        "expert gradients": (layout.etp * layout.ep, layout.edp),
    }[axis]
    return Span(size, min(size, max(1, -(-ranks_per_node // stride))))


def ranks_together(placement: Placement, ranks_per_node: int) -> int:
    """Largest block size that keeps each block of a role's ranks, counted from its first, on one node."""
    if placement.is_whole:
        return ranks_per_node
    nodes = [rank // ranks_per_node for rank in placement.ranks]
    sizes = range(min(ranks_per_node, len(nodes)), 1, -1)
    return next((size for size in sizes if all(nodes[at] == nodes[at - at % size] for at in range(len(nodes)))), 1)


@dataclass(frozen=True)
class Links:
    """Rates and latencies of a rank's links; rates are bytes per second of one rank in one direction."""

    node_bytes_per_s: float
    network_bytes_per_s: float
    node_latency_s: float
    network_latency_s: float

    @classmethod
    def of(cls, hardware: Hardware) -> Links:
        return cls(
            hardware.node_link_gb_s * hardware.link_share * 1e9,
            hardware.network_gb_s * hardware.network_share * 1e9,
            hardware.node_latency_us * 1e-6,
            hardware.network_latency_us * 1e-6,
        )

    def _ring_bytes_per_s(self, group: Span) -> float:
        if not group.crosses_nodes:
            return self.node_bytes_per_s
        # One ring for each of the group's ranks on a node, so that together they use all their network adapters.
        through = group.in_node * self.network_bytes_per_s
        return min(self.node_bytes_per_s, through) if group.in_node > 1 else through

    def _latency_s(self, group: Span) -> float:
        step = self.network_latency_s if group.crosses_nodes else self.node_latency_s
        return step * math.ceil(math.log2(group.size))

    def gather_s(self, group: Span, size: float) -> float:
        """Seconds of an all-gather to `size` bytes, or of a reduce-scatter of as many."""
        if group.size == 1:
            return 0.0
        moved = size * (group.size - 1) / group.size
        return moved / self._ring_bytes_per_s(group) + self._latency_s(group)

    def all_reduce_s(self, group: Span, size: float) -> float:
        return 2 * self.gather_s(group, size)  # a reduce-scatter and an all-gather

    def all_to_all_s(self, group: Span, size: float) -> float:
        """Seconds until every rank has sent `size` bytes, an equal part to each rank."""
        if group.size == 1:
            return 0.0
        part = size / group.size
        inside = (group.in_node - 1) * part / self.node_bytes_per_s
        # To other nodes each rank sends through its own adapter.
        outside = (group.size - group.in_node) * part / self.network_bytes_per_s
        return max(inside, outside) + self._latency_s(group)

    def send_s(self, group: Span, size: float) -> float:
        """Seconds of a message to a neighbour in the group. The slowest pair decides."""
        if group.size == 1:
            return 0.0
        rate = self.network_bytes_per_s if group.crosses_nodes else self.node_bytes_per_s
        return size / rate + (self.network_latency_s if group.crosses_nodes else self.node_latency_s)


Part = Literal["matmul", "attention", "memory", "head", "host", "tp", "cp", "ep", "pp", "tower"]
_WITH_WEIGHTS: tuple[Part, ...] = ("matmul", "head")
FEW_ROWS = 260  # half of the rate of a product that adds up over so many (aiconfigurator, h100_sxm and a100_sxm, gemm of vLLM)
TILE_ROWS, TILE_COLUMNS = 128, 256  # tile of the output that one multiprocessor computes at a time
# Experts that nothing balances: the logarithms of their rows are spread evenly between 1 and 0.8 times the tokens, here of 16,384
# (aiconfigurator measures experts so, its power law of 1.01; its 1.2 is more uneven).
UNEVEN, DRAWS = math.log(0.8 * 16384), 64


@dataclass(frozen=True)
class Pass:
    """Seconds of one micro-batch in the forward and backward pass of one stage, by part."""

    forward: Mapping[Part, float] = field(default_factory=dict)
    backward: Mapping[Part, float] = field(default_factory=dict)

    @property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @property
    def total_s(self) -> float:
        return self.forward_s + sum(self.backward.values())


class Product(NamedTuple):
    """`count` matrix products of equal size: [rows, inner] x [inner, columns] on one rank."""

    rows: float
    inner: float
    columns: float
    count: float = 1.0

    @property
    def weights(self) -> float:
        return self.inner * self.columns * self.count


@cache
def fullest_load(num_experts: int, top_k: int, ranks: int) -> float:
    """Rows of the rank with the most by those of the mean, for experts that nothing balances: all ranks wait for it in every layer.
    An expert has every token at most once."""
    random, total, each = Random(0), 0.0, num_experts // ranks
    for _ in range(DRAWS):
        rows = [math.exp(random.random() * UNEVEN) for _ in range(num_experts)]
        most = sum(rows) / top_k
        while sum(min(one, most) for one in rows) < 0.999 * top_k * most:  # what the fullest cannot take goes to the others
            most = sum(min(one, most) for one in rows) / top_k
        rows = [min(one, most) for one in rows]
        total += max(sum(rows[at : at + each]) for at in range(0, num_experts, each)) * ranks / sum(rows)
    return total / DRAWS


def load_of(arch: ModelArch, layout: ParallelLayout, settings: RoleConfig) -> float:
    """`fullest_load` of a role; 1 if it has no experts on several ranks, or if a term of its routers balances them."""
    balanced = getattr(settings, "router_aux_coef", 0.0) or getattr(settings, "router_bias_rate", 0.0)
    if arch.moe is None or layout.ep == 1 or balanced:
        return 1.0
    return fullest_load(arch.moe.num_experts, arch.moe.top_k, layout.ep)


def layer_products(arch: ModelArch, layout: ParallelLayout, kind: Kind, tokens: float, load: float = 1.0) -> list[Product]:
    """Forward products of one layer on one rank that holds `tokens` (its part under context parallel). load: of its experts, by the
    mean of the ranks."""
    h, tp = arch.hidden_size, layout.tp
    attention = []
    for outputs, inputs, cut in attention_matrices(arch.as_held(tp), kind):
        if not cut:  # every tp rank has it whole, and sequence parallel gives each its tokens
            attention.append(Product(tokens / (tp if layout.sequence_parallel else 1), inputs, outputs))
        elif outputs == h:
            attention.append(Product(tokens, inputs / tp, outputs))
        else:
            attention.append(Product(tokens, inputs, outputs / tp))
    if not kind.sparse:
        return [*attention, Product(tokens, h, 2 * arch.ffn_size / tp), Product(tokens, arch.ffn_size / tp, h)]
    assert arch.moe is not None
    routed = tokens / (tp if layout.sequence_parallel else 1)
    experts, columns = arch.moe.num_experts / layout.ep, arch.moe.ffn_size / layout.etp
    # On average a rank computes as many rows as it sends, times etp.
    rows = load * routed * arch.moe.top_k * layout.etp / experts
    router = Product(routed, h, arch.moe.num_experts)
    shared = arch.moe.shared_size / tp
    if shared:
        attention += [Product(tokens, h, 2 * shared), Product(tokens, shared, h)]
    return [*attention, router, Product(rows, h, 2 * columns, experts), Product(rows, columns, h, experts)]


def product_s(product: Product, itemsize: int, rate: float, hardware: Hardware) -> float:
    """Seconds of a product, at least those of reading its weights. rate: FLOP/s of a large one."""
    rows = TILE_ROWS * math.ceil(product.rows / TILE_ROWS) if hardware.processors > 1 else product.rows
    tiles = rows / TILE_ROWS * max(1.0, product.columns / TILE_COLUMNS) * product.count
    # The last wave of tiles leaves half of the multiprocessors idle on average (NVIDIA, "Matrix Multiplication Background User's
    # Guide", tile and wave quantization).
    idle = 1 + hardware.processors / 2 / tiles if hardware.processors > 1 else 1.0
    arithmetic = MULTIPLY_ADD * rows * product.inner * product.columns * product.count / rate * idle
    return max(arithmetic, product.weights * itemsize / hardware.memory_bytes_per_s)


def stage_pass(
    arch: ModelArch, layout: ParallelLayout, stage: int, settings: RoleConfig, tokens: float, length: float, hardware: Hardware
) -> Pass:
    """Predict the seconds of one micro-batch on one rank of `stage`. tokens: of the micro-batch, over its cp ranks. length: of a
    sequence.

    Matrix products take 2 FLOPs for each weight and token, attention 4 for each channel of a head and key that it sees (Narayanan
    et al. 2021, appendix; half of it under a causal mask). Elementwise kernels write and read the stored activations. The backward
    pass takes twice that; full recomputation adds a forward pass, selective that of attention. Adapters are left out."""
    recompute, lora = getattr(settings, "recomputed", "none"), getattr(settings, "lora", None)
    # Transformers' classes have a kernel for each operation unless they are compiled.
    fused = hardware.is_gpu() and (settings.engine == "megatron" or settings.compile)
    has_logits = stage == layout.pp - 1 and value_head_of(settings) is None  # only the last stage has the vocabulary
    kind = _Kind(settings.dtype, fused, has_logits, lora, load_of(arch, layout, settings))
    whole = _stored_pass(arch, layout, stage, kind, tokens, length, hardware)
    backward = dict(whole.backward)
    again: set[Part] = {"matmul", "attention", "memory", "host", "tp", "cp", "ep"} if recompute == "full" else set()
    again |= {"attention"} if recompute == "selective" else set()
    for part in again & set(whole.forward):
        backward[part] = backward.get(part, 0.0) + whole.forward[part]
    return Pass(whole.forward, backward)


def tower_pass(vision: VisionArch, tokens: float, dtype: Dtype, hardware: Hardware) -> Pass:
    """Predict the seconds of a vision tower on an image, taken as a square, of so many tokens. No rank cuts it, and nothing of it
    is recomputed; elementwise kernels are left out. The product with the pixels has no gradient of its input."""
    rows = max(1, math.isqrt(round(tokens)))
    grid = rows * vision.merge, math.ceil(tokens / rows) * vision.merge
    flops, part = tower_flops(vision, grid), tokens * vision.merge**2 / (grid[0] * grid[1])
    rate, launches = hardware.flops_per_s(dtype), tower_shape(vision).depth * hardware.layer_overhead_us * 1e-6
    backward = BACKWARD * flops.total - flops.embedding
    return Pass({"tower": part * flops.total / rate + launches}, {"tower": part * backward / rate + BACKWARD * launches})


class _Kind(NamedTuple):
    """What a role's settings change about a pass, but for recomputation. load: of its experts."""

    dtype: Dtype
    fused: bool
    has_logits: bool
    lora: Any  # a LoraConfig, which is frozen and so has a hash, or None
    load: float


@lru_cache(maxsize=1 << 16)  # a search asks for the same passes with and without recomputation, of policy and critic
def _stored_pass(
    arch: ModelArch, layout: ParallelLayout, stage: int, kind: _Kind, tokens: float, length: float, hardware: Hardware
) -> Pass:
    """`stage_pass` without recomputation."""
    mine = tokens / layout.cp
    dtype, fused, has_logits, lora, load = kind
    itemsize, rate = ITEMSIZE[dtype], hardware.flops_per_s(dtype)
    layers = list(layout.stage_layers(arch.num_layers, stage))
    times: dict[Part, float] = {"matmul": 0.0, "attention": 0.0, "memory": 0.0, "head": 0.0}
    weights_bytes = short = 0.0
    for of_layer, number, count in _kinds(arch, layers):
        products = layer_products(arch, layout, of_layer, mine, load)
        held = sum(one.weights for one in products) * itemsize
        grouped = hardware.experts_flops_per_s(dtype)
        each = [product_s(one, itemsize, grouped if one.count > 1 else rate, hardware) for one in products]
        times["matmul"] += count * sum(each)
        # Of experts: the products of weights' gradients add up over the rows of each, too few to fill a multiprocessor's pipeline.
        short += count * sum(seconds * FEW_ROWS / one.rows for one, seconds in zip(products, each) if one.count > 1)
        flops = MULTIPLY_ADD * attention_products(arch, number, length)
        times["attention"] += count * mine * flops / layout.tp / hardware.attention_flops_per_s(dtype, length)
        kept = layer_elements_per_token(arch, layout, itemsize, of_layer, fused=fused) * itemsize
        # 2: each stored activation is written once and read once.
        times["memory"] += count * 2 * mine * kept / hardware.memory_bytes_per_s
        # Rows that are sorted, sent, sorted back and added up: not kept, but written and read.
        if of_layer.sparse and hardware.is_gpu():
            assert arch.moe is not None
            rows = mine / (layout.tp if layout.sequence_parallel else 1) * arch.moe.top_k * arch.hidden_size * itemsize
            times["memory"] += count * 6 * load * rows / hardware.memory_bytes_per_s
        weights_bytes += count * held
    if lora is not None:
        times["memory"] += len(layers) * mine * _adapter_elements(arch, lora) * itemsize / layout.tp / hardware.memory_bytes_per_s
    if has_logits:
        times["head"] = _head_s(arch, layout, mine, rate, hardware)
    # One more layer for each chunk: embedding or head, and messages.
    num_sparse = sum(count for kind, count in arch.count_kinds(layers).items() if kind.sparse)
    times["host"] = (
        (len(layers) + layout.vpp) * hardware.layer_overhead_us + num_sparse * hardware.sparse_layer_overhead_us
    ) * 1e-6
    talk = _communication(arch, layout, stage, (len(layers), num_sparse), mine, itemsize, load, hardware)
    forward: dict[Part, float] = {**times, **talk.forward}
    backward: dict[Part, float] = {part: BACKWARD * seconds for part, seconds in times.items()}
    backward["attention"] = hardware.attention_backward * times["attention"]
    if lora is not None:  # weights under adapters have no gradient: of the two backward products only the input's gradient is left
        backward |= {part: (BACKWARD - 1) * times[part] for part in _WITH_WEIGHTS}
    else:
        backward["matmul"] += short if hardware.is_gpu() else 0.0
        # Gradients are added to an fp32 buffer: the product is written and read, the buffer read and written.
        backward["memory"] += weights_bytes / itemsize * (2 * itemsize + 2 * FP32) / hardware.memory_bytes_per_s
    for part, seconds in talk.backward.items():
        backward[part] = backward.get(part, 0.0) + seconds
    return Pass(forward, backward)


@cache  # of a model with experts there are thousands
def _adapter_elements(arch: ModelArch, lora: LoraConfig) -> float:
    """Elements per token and layer that adapters read and write in a forward pass, on all tp ranks. Their products are small."""
    modules = adapted_modules(tensors_to_adapt(arch), lora.targets)
    # The input is read again; what an adapter makes is written, read, and added to the output, which is read and written.
    each = {module: modules[module][1] + 4 * modules[module][0] for module in modules}
    return sum(each[module] * count for module, count in products_per_token(modules, arch.moe).items()) / arch.num_layers


def _kinds(arch: ModelArch, layers: list[int]) -> list[tuple[Kind, int, int]]:
    """(kind, a layer of it, number of such layers) of every kind of layer; those with a window are apart."""
    if arch.moe is None and arch.delta is None and not arch.sliding_layers:
        return [(arch.kind(layers[0]), layers[0], len(layers))]
    found: dict[tuple[Kind, bool], list[int]] = {}
    for layer in layers:
        slides = bool(arch.sliding_layers) and arch.sliding_layers[layer]
        found.setdefault((arch.kind(layer), slides), []).append(layer)
    return [(kind, numbers[0], len(numbers)) for (kind, _), numbers in found.items()]


def _head_s(arch: ModelArch, layout: ParallelLayout, tokens: float, rate: float, hardware: Hardware) -> float:
    """Seconds of output projection and log-probs. The fp32 logits are written and read once, chunk by chunk."""
    rows = arch.vocab_size / layout.tp
    return tokens * rows * (MULTIPLY_ADD * arch.hidden_size / rate + 2 * FP32 / hardware.memory_bytes_per_s)


def _communication(
    arch: ModelArch,
    layout: ParallelLayout,
    stage: int,
    layers: tuple[int, int],
    tokens: float,
    itemsize: int,
    load: float,
    hardware: Hardware,
) -> Pass:
    """Seconds of the collectives of a stage's layers and of its messages to its neighbours. layers: all, and those with experts.
    tokens: of this rank. load: of the rank with the most rows of experts."""
    num_layers, num_sparse = layers
    links, ranks_per_node = Links.of(hardware), hardware.gpus_per_node
    forward: dict[Part, float] = {}
    backward: dict[Part, float] = {}
    hidden = tokens * arch.hidden_size * itemsize
    sequence_shards = layout.tp if layout.sequence_parallel else 1
    if layout.tp > 1:
        group = span(layout, "tp", ranks_per_node)
        # Two all-reduces of the hidden states per layer and direction, or with sequence parallel two all-gathers and two
        # reduce-scatters, and in the backward pass two all-gathers more, of inputs stored as shards (Korthikanti et al. 2022,
        # section 4.2.2).
        half = links.gather_s(group, hidden)  # half of an all-reduce
        shared = arch.moe is not None and arch.moe.shared_size > 0
        blocks = 2 * num_layers - (0 if shared else num_sparse)  # attention, and a dense MLP or shared experts
        ends = (stage == 0) + 2 * (stage == layout.pp - 1)  # embedding; log-probs gather and reduce hidden states
        forward["tp"] = half * (2 * blocks + ends)
        backward["tp"] = half * (2 * blocks + ends + (blocks if layout.sequence_parallel else 0))
    if layout.cp > 1:
        # Queries, keys and values are exchanged for heads, and the output back (`models/attention.py`).
        group = span(layout, "cp", ranks_per_node)
        heads, kv_heads = arch.num_heads // layout.tp, max(arch.as_held(layout.tp).num_kv_heads // layout.tp, layout.cp)
        row = arch.key_dim * itemsize  # of a value too, which latent attention pads
        each = links.all_to_all_s(group, tokens * (heads + 2 * kv_heads) * row) + links.all_to_all_s(group, tokens * heads * row)
        forward["cp"] = backward["cp"] = each * num_layers
    if num_sparse and layout.ep * layout.etp > 1:
        assert arch.moe is not None
        # Rows go to their experts and back (Megatron-core's all-to-all dispatcher), gathered and reduced over etp.
        rows = load * hidden * arch.moe.top_k / sequence_shards
        each = 2 * links.all_to_all_s(span(layout, "ep", ranks_per_node), rows)
        each += 2 * links.gather_s(span(layout, "etp", ranks_per_node), rows * layout.etp)
        forward["ep"] = backward["ep"] = each * num_sparse
    if layout.pp > 1:
        # The hidden states of a micro-batch cross every boundary of a chunk.
        group = span(layout, "pp", ranks_per_node)
        forward["pp"] = backward["pp"] = layout.vpp * links.send_s(group, hidden / sequence_shards)
    return Pass(forward, backward)
