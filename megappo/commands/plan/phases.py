"""Memory of one rank through the phases of a PPO step, and the tightest phase of each role. In each phase one role works and the
others rest. `remedies.py` finds settings that relieve a phase."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.commands.plan.estimate import Plan, beside_sampler, roles_beside_sampler
from megappo.commands.plan.memory import Moment, RoleMemory
from megappo.config.layout_checks import roles_in_use, trained_sections, value_head_of
from megappo.config.role_sections import RewardModelConfig, section_of
from megappo.config.schema import TrainConfig


@dataclass(frozen=True)
class Phase:
    """Memory of one rank while one role works, in bytes."""

    name: str
    role: str
    """The role at work; `rollout` is vLLM."""
    rest: int
    """Resident state of all roles, the reserve, and the part of vLLM that does not sleep."""
    work: int
    """Bytes that exist only in this phase."""

    @property
    def total(self) -> int:
        return self.rest + self.work


def phases(plan: Plan, rank: int) -> list[Phase]:
    """Phases of one rank in the order of a step: stages 2, 3, 4, 6, 7 and 8 of trainer/ppo.py."""
    # The other stages hold a few bytes per token. The buffers of a push to vLLM are not counted.
    at_rest = plan.trainer_at_rest(rank)
    found: list[Phase] = []

    def add(name: str, role: str, work: int, moment: Moment = "train") -> None:
        beside = plan.rollout_bytes(moment) if plan.generates(rank) else 0
        found.append(Phase(name, role, beside + at_rest, work))

    def memory(role: str) -> RoleMemory:
        return plan.stage(role, rank)

    here = plan.roles_on(rank)
    if plan.generates(rank):
        add("generate", "rollout", 0, "generate")
    elif plan.rollout is None and "policy" in here:
        add("generate", "policy", memory("policy").inferring, "generate")
    for role in filter(here.__contains__, forward_passes(plan.config)):
        add(pass_name(plan.config, role), role, memory(role).inferring)
    trained = [role for role in trained_sections(plan.config) if role in here]
    for role in sorted(trained, key=lambda role: role == "policy"):  # PPO's order of updates: the critics first
        add(f"{role} update", role, memory(role).updating)
        add(f"{role} optimizer step", role, memory(role).stepping)
    if "policy" in here:
        add("push weights", "policy", memory("policy").offloaded_weights, "pushed")
    for role in filter(here.__contains__, roles_beside_sampler(plan.config)):
        # A checkpoint is written role by role, every rank its own part, tensor by tensor.
        what = f"{role} checkpoint" if role in trained_sections(plan.config) else f"{pass_name(plan.config, role)}, evaluation"
        add(what, role, beside_sampler(plan.config, role, memory(role)), "pushed")
    return found


def forward_passes(config: TrainConfig) -> list[str]:
    """Roles in the order of their passes without gradients: the reward model (stage 3) before the others (stage 4)."""
    return sorted(roles_in_use(config), key=lambda role: role != "reward_model")


def pass_name(config: TrainConfig, role: str) -> str:
    """Name of a role's pass without gradients: `log-probs`, `values`, `reference log-probs`, `reward model scores`."""
    section = section_of(config, role)
    if isinstance(section, RewardModelConfig):
        return "reward model scores"
    results = "log-probs" if value_head_of(section) is None else "values"
    return results if role in ("policy", "critic") else f"{role} {results}"


def tightest(plan: Plan) -> dict[str, tuple[Phase, int]]:
    """Role -> (its tightest phase on any rank, the rank)."""
    by_role: dict[str, tuple[Phase, int]] = {}
    for rank in plan.distinct_ranks():
        for phase in phases(plan, rank):
            if phase.role not in by_role or phase.total > by_role[phase.role][0].total:
                by_role[phase.role] = phase, rank
    return by_role
