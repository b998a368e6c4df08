"""Cases of the store's world in which one layout writes and another one reads, for `test_resharding.py`.

The oracle are whole Hugging Face tensors, of the weights and of everything the optimizer keeps, gathered from the optimizer's own
tensors on all ranks: nothing of the code that describes them for a checkpoint is asked.
"""

from __future__ import annotations

import re

import torch

from megappo.engine.whole_batch import pass_whole_batch
from tests.checkpoint import runs

DENSE_POLICY = ("tp2", "pp2", "pp2 vpp2", "pp2 uneven", "dp2", "cp2", "tp2")
DENSE_CRITIC = ("pp2", "dp2", "tp2", "pp2 uneven", "pp2")
EXPERTS_POLICY = ("ep2", "tp2 sp etp2", "pp2 vpp2", "tp2 sp ep2", "dp2", "ep2")
EXPERTS_CRITIC = ("pp2", "ep2", "tp2 sp", "cp2", "pp2")
BF16 = {"dtype": torch.bfloat16}
PLAIN = {"distributed": False}
# name -> (role is critic, layouts, options of runs.engine)
CHAINS = {
    "policy bf16": (False, DENSE_POLICY, {"tied": True, **BF16}),
    "critic fp32 plain optimizer": (True, DENSE_CRITIC, PLAIN),
    "policy with experts fp32": (False, EXPERTS_POLICY, {"experts": True}),
    "critic with experts bf16": (True, EXPERTS_CRITIC, {"experts": True, **BF16}),
}


def chain(critic, names, options):
    """Through a chain of layouts and back, every other hop with the other kind of optimizer: weights and optimizer against the
    oracle on each hop, this rank's own bits at the end.
    """
    kind = options.get("distributed", True)

    def case(layouts, place):
        first = runs.engine(layouts[names[0]], critic=critic, **options)
        train(first)
        wanted, wrong, current = whole_state(first, layouts[names[0]]), [], first
        for hop, name in enumerate(names[1:]):
            kept = runs.store(place / str(hop))
            kept.save(1, {"model": current}, {}, runs.FACTS)
            other_kind = hop % 2 == 0 and name != names[-1]
            current = runs.engine(layouts[name], critic=critic, seed=9, **{**options, "distributed": kind != other_kind})
            kept.load({"model": current}, {}, runs.FACTS)
            wrong += [f"{name}: {part}" for part in differing_tensors(wanted, whole_state(current, layouts[name]))]
        return {
            "wrong": wrong,
            "parts": sorted(wanted),
            "own": runs.differing(runs.engine_digest(first), runs.engine_digest(current)),
            "main is not rounded to weight": [n for n in wanted if n.startswith("main ") and not rounds_to_weight(wanted, n)],
        }

    return case


def train(engine, steps=2):
    for step in range(steps):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            pass_whole_batch(engine, runs.batch(step), lambda output, micro: runs.squares(1.0, output, micro), denominator=25.0)
            engine.lr_scheduler_step()
            assert engine.optimizer_step().applied


# ---------------------------------------------------------------------------------------------------- weights of another role


def critic_from_checkpoint(layouts, place):
    """A critic that starts from the critic or the policy of another run, which had other layouts and another dtype."""
    kept, options = runs.store(place), {"experts": True, **BF16}
    policy = runs.engine(layouts["ep2"], critic=False, **options)
    critic = runs.engine(layouts["pp2 vpp2"], critic=True, seed=1, **options)
    kept.save(1, {"policy": policy, "critic": critic}, {}, runs.FACTS)

    def start(layout, role, spoil=None, **changes):
        engine = runs.engine(layouts[layout], critic=True, seed=9, **{**options, **changes})
        if spoil is not None:
            spoil(engine)
        kept.load_weights(role, engine, 1, with_head=role == "critic")
        engine.save_state(with_optimizer=True)  # creates the moments
        return whole_state(engine, layouts[layout])

    sources = {"policy": weights(policy, layouts["ep2"]), "critic": weights(critic, layouts["pp2 vpp2"])}
    own_head = weights(runs.engine(layouts["dp2"], critic=True, seed=9, **options), layouts["dp2"])[HEAD]
    from_critic, from_policy = start("cp2", "critic", dtype=torch.float32), start("pp2 uneven", "policy")
    shifted = start("dp2", "policy", shift_experts)
    unfit = {
        # Only the last stage misses something: the first must not go on and wait for it.
        "policy with head": lambda: kept.load_weights("policy", runs.engine(layouts["pp2"], critic=True, **options), 1),
        "dense": lambda: kept.load_weights("policy", runs.engine(layouts["dp2"], critic=True), 1, with_head=False),
        "absent": lambda: kept.load_weights("reward", runs.engine(layouts["dp2"], critic=True, **options), 1),
    }
    return {
        "critic": differing_tensors(sources["critic"], only(from_critic, "weight ")),
        "policy": differing_tensors(sources["policy"], only(from_policy, "weight ")),
        "head": torch.equal(from_policy[HEAD], own_head),
        "main": [name for name in only(from_policy, "main ") if not rounds_to_weight(from_policy, name)],
        "mains": len(only(from_policy, "main ")),
        "moments": max(float(values.abs().max()) for values in only(from_policy, "exp_avg").values()),
        "shifted": differing_tensors(sources["policy"], only(shifted, "weight ")),
        "unfit": {name: runs.message(ValueError, action) for name, action in unfit.items()},
    }


HEAD, OUTPUT = "weight score.weight", "weight lm_head.weight"


def weights(engine, groups):
    mine = {name: parameter.detach().float() for name, parameter in engine.named_parameters().items()}
    return {f"weight {name}": tensor for name, tensor in assemble(mine, engine, groups).items()}


def only(whole, start):
    return {name: tensor for name, tensor in whole.items() if name.startswith(start)}


# ---------------------------------------------------------------------------------------------------- controls


def spoiled_loads(layouts, place):
    """kind of mistake in what is loaded -> what the oracle says differs. "none": no mistake."""
    first = runs.engine(layouts["ep2"], critic=False, experts=True)
    train(first)
    wanted = whole_state(first, layouts["ep2"])
    kept = runs.store(place)
    kept.save(1, {"model": first}, {}, runs.FACTS)
    results = {}
    for mistake, spoil in SPOILS.items():
        engine = runs.engine(layouts["dp2"], critic=False, seed=9, experts=True)
        spoil(engine)
        kept.load({"model": engine}, {}, runs.FACTS)
        results[mistake] = differing_tensors(wanted, whole_state(engine, layouts["dp2"]))
    return results


def when_asked_for(rename):
    """Boxes are read from the tensors of these names instead of theirs. rename: a name of a tensor -> another one."""

    def change(engine):
        describe = engine.boxes_to_load
        engine.boxes_to_load = lambda *args, **how: [box._replace(key=rename(box.key)) for box in describe(*args, **how)]

    return change


def of_weights(pattern, other):
    def rename(key):
        return key if key.startswith("optimizer.") else re.sub(pattern, lambda match: match[1] + other[match[2]] + match[3], key)

    return when_asked_for(rename)


shift_experts = of_weights(r"(experts\.)(\d)(\.)", {"0": "1", "1": "2", "2": "3", "3": "0"})
swap_layers = of_weights(r"(layers\.)([23])(\.)", {"2": "3", "3": "2"})


def exchange_moments(key):
    """The first moments of two experts' second matrices."""
    if not (key.startswith("optimizer.state.exp_avg.") and key.endswith("down_proj.weight")):
        return key
    return re.sub(r"(experts\.)([01])\.", lambda match: f"{match[1]}{1 - int(match[2])}.", key)


def forget_step(engine):
    loaded = engine.boxes_loaded
    engine.boxes_loaded = lambda position: loaded({**position, "updates": 0})


SPOILS = {
    "none": lambda engine: None,
    "experts shifted by one": shift_experts,
    "layers swapped": swap_layers,
    "moments of two experts swapped": when_asked_for(exchange_moments),
    "step forgotten": forget_step,
}


# ---------------------------------------------------------------------------------------------------- the oracle


def whole_state(engine, groups):
    """ "weight model.norm.weight", "main ...", "exp_avg ...", "exp_avg_sq ..." -> whole tensor, fp32; "step" -> its number."""
    engine.to("device")
    kinds = {"weight": {name: parameter.detach().float() for name, parameter in engine.named_parameters().items()}}
    steps = set()
    for name, parameter in engine.named_parameters().items():
        for kind, values in local_optimizer_state(engine, parameter, steps).items():
            kinds.setdefault(kind, {})[name] = values
    every = [step for theirs in runs.gathered(sorted(steps), groups.host) for step in theirs]
    whole = {"step": torch.tensor(sorted(set(every)))}
    for kind in sorted({kind for theirs in runs.gathered(sorted(kinds), groups.host) for kind in theirs}):
        whole |= {f"{kind} {name}": tensor for name, tensor in assemble(kinds.get(kind, {}), engine, groups).items()}
    return whole


def local_optimizer_state(engine, parameter, steps):
    """kind -> tensor shaped like the parameter, NaN where another rank keeps the values."""
    for optimizer in engine._optimizer._chained():
        for main, state in optimizer.optimizer.state.items():
            start = place_in(optimizer, parameter, main)
            if start is None:
                continue
            steps.add(int(state["step"]))
            kept = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if parameter.dtype != torch.float32:
                kept["main"] = main
            return {kind: spread(values.detach(), start, parameter) for kind, values in kept.items()}
    return {}


def place_in(optimizer, parameter, main):
    """Offset in the flattened parameter of the tensor that the optimizer updates; None if it is another parameter's."""
    if parameter.dtype == torch.float32:
        offset, remainder = divmod(main.data_ptr() - parameter.data_ptr(), 4)
        return offset if not remainder and 0 <= offset < parameter.numel() else None
    if getattr(parameter, "main_param", None) is not main:
        return None
    sharded = getattr(parameter, "main_param_sharded", False)
    return optimizer._get_model_param_range_map(parameter)["param"].start if sharded else 0


def spread(values, start, parameter):
    whole = torch.full((parameter.numel(),), torch.nan)
    whole[start : start + values.numel()] = values.flatten()
    return whole.view(parameter.shape)


def assemble(mine, engine, groups):
    """Hugging Face tensors from all ranks' pieces; copies on several ranks must be the same to the bit."""
    from megappo.models.pieces import as_2d, rectangle
    from megappo.models.weight_map import hf_tensors

    held = [
        (piece.hf, box, rectangle(mine[piece.local], piece.slot, piece.row, piece.col, box.rows, box.cols).clone())
        for piece in engine.pieces()[groups.position]
        if piece.local in mine and (box := piece.box)
    ]
    whole = {name: torch.full(shape, torch.nan) for name, shape in hf_tensors(engine.arch, engine.value_head).items()}
    for theirs in runs.gathered(held, groups.host):
        for name, box, values in theirs:
            target, known = as_2d(whole[name])[box.r0 : box.r1, box.c0 : box.c1], ~values.isnan()
            twice = known & ~target.isnan()
            assert torch.equal(target[twice], values[twice]), f"copies of {name} differ between ranks"
            target[known] = values[known]
    whole = {name: tensor for name, tensor in whole.items() if not tensor.isnan().all()}
    assert not any(tensor.isnan().any() for tensor in whole.values()), "a part of a tensor is held by no rank"
    return whole


def differing_tensors(wanted, found):
    lonely = wanted.keys() ^ found.keys()
    return sorted(lonely | {name for name in wanted.keys() & found.keys() if not torch.equal(wanted[name], found[name])})


def rounds_to_weight(whole, name):
    return torch.equal(whole[name].bfloat16().float(), whole[f"weight {name.removeprefix('main ')}"])


CASES = {
    **{f"reshard {name}": chain(*case) for name, case in CHAINS.items()},
    "spoiled loads": spoiled_loads,
    "critic from checkpoint": critic_from_checkpoint,
}
