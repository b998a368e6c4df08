"""One PPO step written out with transformers and plain loops, in fp64: what every layout has to reproduce.

Shares no code with megappo. One sequence at a time, so there is nothing to pack, pad, cut or align; the formulas are those of
docs/parity.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """tokens: [t] int64. sampled: [t] bool. truncated: cut by the length limit."""

    tokens: Tensor
    sampled: Tensor
    score: float
    truncated: bool


@dataclass(frozen=True)
class Numbers:
    """Settings of the step; see `config.schema` for the names."""

    temperature: float
    gamma: float
    lam: float
    kl_coef: float
    clip: float
    value_clip: float
    entropy_coef: float
    lr: float
    adam_eps: float
    betas: tuple[float, float]
    weight_decay: float
    clip_grad: float
    router_aux_coef: float


@dataclass(frozen=True)
class Outcome:
    """Per sample: lists of [t] fp64 tensors, zero where nothing is defined. Per mini-batch: floats. gradients: of the first one."""

    fields: dict[str, list[Tensor]]
    bootstrap: list[float]
    losses: dict[str, list[float]]
    grad_norms: dict[str, list[float]]
    gradients: dict[str, dict[str, Tensor]]
    parameters: dict[str, dict[str, Tensor]]


def value_head(hidden_size: int, seed: int) -> Tensor:
    """[1, H]: normal with variance 1 / (H + 1)."""
    return torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed)) * (hidden_size + 1) ** -0.5


class ValueModel(torch.nn.Module):
    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.body: Any = load(folder).model
        self.score = torch.nn.Parameter(value_head(self.body.config.hidden_size, seed).double())

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.body(input_ids=tokens[None]).last_hidden_state[0] @ self.score.T)[:, 0]


class AdaptedLinear(torch.nn.Module):
    """y = x W^T + scale * (x A^T) B^T, with W frozen (arXiv:2106.09685)."""

    def __init__(self, base: torch.nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.weight, self.scale = base.weight, scale
        self.lora_A = torch.nn.Linear(a.shape[1], a.shape[0], bias=False)
        self.lora_B = torch.nn.Linear(b.shape[1], b.shape[0], bias=False)
        self.lora_A.weight, self.lora_B.weight = (torch.nn.Parameter(values.double()) for values in (a, b))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.scale * self.lora_B(self.lora_A(x))


@dataclass(frozen=True)
class Adapters:
    """tensors: start of every adapter, `model.layers.0.self_attn.q_proj.lora_A.weight` -> [rank, in], lora_B -> [out, rank]."""

    tensors: dict[str, Tensor]
    scale: float

    def put_on(self, model: torch.nn.Module) -> None:
        """Freeze the model, except a value head, and adapt its linears."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name == "score")
        root = "body." if isinstance(model, ValueModel) else "model."
        for name, a in self.tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                path = root + module.removeprefix("model.")
                b = self.tensors[f"{module}.lora_B.weight"]
                model.set_submodule(path, AdaptedLinear(cast(torch.nn.Linear, model.get_submodule(path)), a, b, self.scale))


def load(folder: Path) -> Any:
    """The plainest code path of transformers; its grouped GEMM for experts has no fp64."""
    config = transformers.AutoConfig.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config).double().eval()


class BalancingLoss:
    """Sum over sparse layers of L = sum_i f_i P_i of the sequence that went through `model` last (DeepSeek-V3, eq. 17-20)."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._config = load_config_of(model)
        self._seen: list[tuple[Tensor, Tensor]] = []
        for name, module in model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                module.register_forward_hook(lambda gate, inputs, outputs: self._seen.append((outputs[0], outputs[2])))

    def forget(self) -> None:
        self._seen.clear()

    def of_last(self) -> Tensor | float:
        total: Tensor | float = 0.0
        for logits, chosen in self._seen:
            scores = torch.softmax(logits, -1)
            if hasattr(self._config, "n_group"):  # DeepSeek-V3's own scores, eq. 15 and 19
                scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            top_k, num_experts = self._config.num_experts_per_tok, scores.shape[1]
            counts = torch.bincount(chosen.flatten(), minlength=num_experts)
            total = total + (counts * num_experts / (top_k * len(scores)) * scores.mean(0)).sum()
        return total


def load_config_of(model: Any) -> transformers.PretrainedConfig:
    return model.body.config if isinstance(model, ValueModel) else model.config


def token_logprobs(model: torch.nn.Module, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log pi(x_t | x_<t) and the entropy of that distribution, at t; 0 at the first token."""
    logits = model(input_ids=tokens[None]).logits[0].double() / temperature
    logp = torch.log_softmax(logits, -1)
    zero = logp.new_zeros(1)
    chosen = torch.stack([logp[t - 1, tokens[t]] for t in range(1, len(tokens))]) if len(tokens) > 1 else logp.new_zeros(0)
    entropy = -(logp.exp() * logp).sum(-1)[:-1]
    return torch.cat([zero, chosen]), torch.cat([zero, entropy])


def state_values(model: ValueModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """V(x_<t) at t, 0 at the first token; and the value after the last token."""
    raw = model(tokens)
    return torch.cat([raw.new_zeros(1), raw[:-1]]), raw[-1]


def shaped_rewards(sample: Sample, logprob: Tensor, ref_logprob: Tensor, kl_coef: float) -> Tensor:
    reward = torch.zeros_like(logprob)
    where = sample.sampled.nonzero().flatten().tolist()
    for t in where:
        reward[t] = -kl_coef * (logprob[t] - ref_logprob[t])
    if where:
        reward[where[-1]] += sample.score
    return reward


def advantages(sample: Sample, reward: Tensor, value: Tensor, bootstrap: float, gamma: float, lam: float) -> Tensor:
    """Backwards over the sampled tokens only; what lies between them is skipped."""
    out = torch.zeros_like(reward)
    next_value, carried = (bootstrap if sample.truncated else 0.0), 0.0
    for t in reversed(sample.sampled.nonzero().flatten().tolist()):
        carried = float(reward[t]) + gamma * next_value - float(value[t]) + gamma * lam * carried
        out[t] = carried
        next_value = float(value[t])
    return out


def whitened(rows: Sequence[Tensor], samples: Sequence[Sample]) -> list[Tensor]:
    inside = torch.cat([row[sample.sampled] for row, sample in zip(rows, samples)])
    scale = math.sqrt(float(inside.var()) + 1e-8)
    return [torch.where(s.sampled, (row - inside.mean()) / scale, 0.0) for row, s in zip(rows, samples)]


def policy_objective(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = (new - old).exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))


def value_objective(new: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    clipped = old + (new - old).clamp(-clip, clip)
    return torch.maximum((new - returns) ** 2, (clipped - returns) ** 2) / 2


def ppo_step(
    policy_dir: Path,
    reference_dir: Path,
    samples: Sequence[Sample],
    order: Sequence[Sequence[int]],
    numbers: Numbers,
    seed: int,
    adapters: Adapters | None = None,
) -> Outcome:
    """order: the samples of each mini-batch, one optimizer step each; critic and policy take the same. adapters: of both, each its
    own copy; None trains all weights.
    """
    policy, critic, reference = load(policy_dir), ValueModel(policy_dir, seed), load(reference_dir)
    if adapters is not None:
        adapters.put_on(policy)
        adapters.put_on(critic)
    n = numbers
    with torch.no_grad():
        fields: dict[str, list[Tensor]] = {}
        pairs = [token_logprobs(policy, s.tokens, n.temperature) for s in samples]
        fields["logprobs"], fields["entropies"] = [p[0] for p in pairs], [p[1] for p in pairs]
        fields["reference logprobs"] = [token_logprobs(reference, s.tokens, n.temperature)[0] for s in samples]
        pairs = [state_values(critic, s.tokens) for s in samples]
        fields["values"], bootstrap = [p[0] for p in pairs], [float(p[1]) for p in pairs]
        fields["rewards"] = [
            shaped_rewards(s, lp, ref, n.kl_coef) for s, lp, ref in zip(samples, fields["logprobs"], fields["reference logprobs"])
        ]
        raw = [
            advantages(s, r, v, b, n.gamma, n.lam) for s, r, v, b in zip(samples, fields["rewards"], fields["values"], bootstrap)
        ]
        fields["returns"] = [torch.where(s.sampled, a + v, 0.0) for s, a, v in zip(samples, raw, fields["values"])]
        fields["advantages"] = whitened(raw, samples)

    def critic_loss(index: int) -> tuple[Tensor, Tensor]:
        s, where = samples[index], samples[index].sampled
        value, _ = state_values(critic, s.tokens)
        loss = value_objective(value[where], fields["values"][index][where], fields["returns"][index][where], n.value_clip).sum()
        return loss, loss

    def policy_loss(index: int) -> tuple[Tensor, Tensor]:
        s, where = samples[index], samples[index].sampled
        logprob, entropy = token_logprobs(policy, s.tokens, n.temperature)
        surrogate = policy_objective(
            logprob[where], fields["logprobs"][index][where], fields["advantages"][index][where], n.clip
        ).sum()
        return surrogate - n.entropy_coef * entropy[where].sum(), surrogate

    losses, norms, gradients, parameters = {}, {}, {}, {}
    for role, model, loss_of in (("critic", critic, critic_loss), ("policy", policy, policy_loss)):
        first: dict[str, Tensor] | None = None
        optimizer, balance = adamw(model, n), BalancingLoss(model)
        losses[role], norms[role] = [], []
        for chosen in order:
            count = sum(int(samples[i].sampled.sum()) for i in chosen)
            optimizer.zero_grad()
            total: Any = 0.0
            reported: Any = 0.0
            for index in chosen:
                balance.forget()
                objective, plain = loss_of(index)
                total = total + objective / count + n.router_aux_coef * balance.of_last() / len(chosen)
                reported = reported + plain / count
            total.backward()
            if first is None:
                first = {k: v.grad.clone() for k, v in model.named_parameters() if v.grad is not None}
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
            if norm > n.clip_grad:
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad * (n.clip_grad / (norm + 1e-6))
            optimizer.step()
            losses[role].append(float(reported.detach()))
            norms[role].append(norm)
        gradients[role] = hf_names(first or {}, model)
        constants = {k: v for k, v in model.named_buffers() if "correction" in k}
        parameters[role] = hf_names({k: v.detach() for k, v in model.named_parameters()} | constants, model)
    return Outcome(fields, bootstrap, losses, norms, gradients, parameters)


def adamw(model: torch.nn.Module, n: Numbers) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, nor those of a layer's experts in one tensor."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if p.dim() > 1 and not name.endswith("_bias")]
    vectors = [p for name, p in trained.items() if p.dim() == 1 or name.endswith("_bias")]
    groups = [{"params": matrices, "weight_decay": n.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=n.lr, betas=n.betas, eps=n.adam_eps)


def hf_names(tensors: dict[str, Tensor], model: torch.nn.Module) -> dict[str, Tensor]:
    """Names of a checkpoint on the hub: one tensor for each expert, `score.weight` for the head, `model.` before the body."""
    kind, out = load_config_of(model).model_type, dict[str, Tensor]()
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in tensors.items():
        name = name.replace("body.", "model.")
        name = name.replace(".mlp.", ".block_sparse_moe.") if kind == "mixtral" else name
        prefix, _, last = name.rpartition(".experts.")
        if name == "score":
            out["score.weight"] = tensor
        elif not prefix or kind == "gpt_oss":  # whose files hold experts as transformers does
            out[name] = tensor
        else:
            parts = {"gate_up_proj": (gate, up), "down_proj": (down,)}[last]
            for expert, whole in enumerate(tensor):
                rows = zip(parts, whole.chunk(len(parts)))
                out |= {f"{prefix}.experts.{expert}.{part}.weight": values for part, values in rows}
    return out
