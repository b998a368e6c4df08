"""Losses of TRL on a few responses, recorded in trl_losses.json: `python tests/algo/trl_losses.py` where TRL is installed.
Inputs are made from a seed, and the figures are of TRL's own trainers, given log-probs and scores in place of a model."""

import importlib.metadata
import json
import types
from pathlib import Path

import torch

FIGURES = Path(__file__).with_suffix(".json")
BETA, SMOOTHING, GAMMA, CENTRE, SEED = 0.3, 0.1, 0.7, 0.01, 7
DESIRABLE, UNDESIRABLE = 1.0, 1.4
LABELS = [1, 1, -1, 1, -1, -1, 1, -1]


def inputs():
    """Four pairs as eight responses, chosen ones at even indices: lengths, log-probs of their tokens (joined, fp32) and of the
    reference, those of eight responses to other prompts under both models, scores and margins [4]."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(1, 7, (8,), generator=generator).tolist()
    logprob = -3.0 * torch.rand(sum(lengths), generator=generator)
    reference = torch.stack([part.sum() for part in logprob.split(lengths)]) + torch.randn(8, generator=generator)
    mismatched = -9.0 * torch.rand(8, generator=generator)
    return {
        "lengths": lengths,
        "logprob": logprob,
        "reference": reference,
        "mismatched": mismatched,
        "mismatched_reference": mismatched - 0.2 - 0.1 * torch.randn(8, generator=generator),
        "score": 2.0 * torch.randn(8, generator=generator),
        "margin": torch.rand(4, generator=generator),
    }


def padded(parts):
    """[B, 1 + longest] rows that begin with a token of the prompt, and their mask of the response."""
    width = 1 + max(map(len, parts))
    rows = torch.stack([torch.nn.functional.pad(part, (1, width - 1 - len(part))) for part in parts])
    mask = torch.tensor([[0, *[1] * len(part), *[0] * (width - 1 - len(part))] for part in parts])
    return rows, mask


def record():
    from accelerate import Accelerator

    def of_trl(name):
        return getattr(importlib.import_module(f"trl.{name.rpartition('.')[0]}"), name.rpartition(".")[2])

    DPOTrainer, KTOTrainer = of_trl("trainer.dpo_trainer.DPOTrainer"), of_trl("trainer.kto_trainer.KTOTrainer")
    RewardTrainer = of_trl("trainer.reward_trainer.RewardTrainer")
    CPOTrainer, ORPOTrainer = (
        of_trl("experimental.cpo.cpo_trainer.CPOTrainer"),
        of_trl("experimental.orpo.orpo_trainer.ORPOTrainer"),
    )
    given = inputs()
    order = [*range(0, 8, 2), *range(1, 8, 2)]  # TRL's batch: chosen responses, then rejected ones
    figures = {}

    def keep(name, loss_of, leaf="logprob"):
        value = given[leaf].clone().requires_grad_()
        loss = loss_of(value)
        loss.backward()
        figures[name] = {"loss": float(loss), "gradient": value.grad.tolist()}

    def trainer_of(cls, **attributes):
        made = object.__new__(cls)
        own = {"accelerator": Accelerator(cpu=True), "aux_loss_enabled": False, "_total_train_tokens": 0, "_tp_size": 1}
        made.__dict__.update(
            own | {"_metrics": {"train": _Lists(), "eval": _Lists()}, "model": types.SimpleNamespace(training=True)} | attributes
        )
        return made

    def outputs(rows):
        zeros = torch.zeros_like(rows)
        return types.SimpleNamespace(log_probs=rows, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())

    def dpo(types_, weights=(1.0,)):
        made = trainer_of(
            DPOTrainer,
            beta=BETA,
            loss_types=types_,
            loss_weights=weights,
            f_divergence_type="reverse_kl",
            precompute_ref_logps=True,
            ld_alpha=None,
            use_weighting=False,
            label_smoothing=SMOOTHING,
        )

        def loss_of(logprob):
            parts = logprob.split(given["lengths"])
            rows, mask = padded([parts[i] for i in order])
            batch = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
            reference = given["reference"][order].chunk(2)
            batch |= dict(zip(("ref_chosen_logps", "ref_rejected_logps"), reference))
            return made._compute_loss(lambda **_: outputs(rows[:, 1:]), batch, False)

        return loss_of

    def kto(logprob):
        made = trainer_of(
            KTOTrainer,
            beta=BETA,
            loss_type="kto",
            calculate_KL=True,
            precompute_ref_logps=True,
            desirable_weight=DESIRABLE,
            undesirable_weight=UNDESIRABLE,
        )
        rows, mask = padded(logprob.split(given["lengths"]))
        other = given["mismatched"][:, None]
        batch = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask, "label": torch.tensor(LABELS) > 0}
        ids = torch.tensor([[0, 1]] * 8)
        batch |= {"KL_input_ids": ids, "KL_completion_mask": ids, "KL_attention_mask": ids}
        batch |= {"ref_logps": given["reference"], "ref_KL_logps": given["mismatched_reference"]}

        def model(input_ids, **_):
            return outputs(other if input_ids is ids else rows[:, 1:])

        return made._compute_loss(model, batch, False)

    def means(logprob):
        return torch.stack([part.mean() for part in logprob.split(given["lengths"])])[order].chunk(2)

    def simpo(logprob):
        accelerator = types.SimpleNamespace(device="cpu")
        settings = {"beta": BETA, "alpha": 0.0, "loss_type": "simpo", "simpo_gamma": GAMMA, "label_smoothing": SMOOTHING}
        made = trainer_of(CPOTrainer, **settings | {"accelerator": accelerator})
        return made.cpo_loss(*means(logprob))[0].mean()

    def orpo(logprob):
        made = trainer_of(ORPOTrainer, beta=BETA)
        chosen = torch.cat(logprob.split(given["lengths"])[::2])
        return -chosen.mean() - made.odds_ratio_loss(*means(logprob))[0].mean()

    def reward(margin):
        made = trainer_of(RewardTrainer, args=types.SimpleNamespace(center_rewards_coefficient=CENTRE))

        def loss_of(score):
            batch = {"attention_mask": torch.ones(8, 1), **({"margin": given["margin"]} if margin else {})}
            return made.compute_loss(lambda **_: types.SimpleNamespace(logits=score[order, None]), batch)

        return loss_of

    keep("sigmoid", dpo(["sigmoid"]))
    keep("sigmoid_norm", dpo(["sigmoid_norm"]))
    keep("rpo", dpo(["sigmoid", "sft"], (1.0, 0.5)))
    keep("ipo", dpo(["ipo"]))
    keep("kto", kto)
    keep("simpo", simpo)
    keep("orpo", orpo)
    keep("reward", reward(False), "score")
    keep("reward_margin", reward(True), "score")
    FIGURES.write_text(json.dumps({"trl": importlib.metadata.version("trl"), "seed": SEED, "figures": figures}, indent=None) + "\n")


class _Lists(dict):
    def __missing__(self, key):
        return self.setdefault(key, [])


if __name__ == "__main__":
    record()
