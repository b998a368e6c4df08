"""One step of PPO, written out: the parts of megappo as a library, in one process, without vLLM.

    scripts/quickstart.sh        # once: makes the model and the data that configs/quickstart.yaml names
    python examples/ppo_step_by_hand.py configs/quickstart.yaml [key=value ...]

The stages are those of megappo/trainer/ppo.py, which does the same on any number of ranks.
"""

from __future__ import annotations

import sys
from contextlib import closing

import torch

from megappo.commands.plan.run import plan_run
from megappo.config.loading import load_config
from megappo.engine.build import RoleEngines
from megappo.ops import dispatch
from megappo.parallel.device import select_device, start_alone
from megappo.rollout.generation import generate
from megappo.trainer.advantages import add_advantages
from megappo.trainer.build_roles import build_roles
from megappo.trainer.experience.collect import collect, requests_of_step
from megappo.trainer.model_outputs import add_model_outputs
from megappo.trainer.sampling import rollout_of, sampling_params, scorer_of
from megappo.trainer.scoring import score_responses
from megappo.trainer.updates import Updates

# One rank, and the policy's own model generates: slower than vLLM, and nothing to start.
ALONE = ("run.num_ranks=1", "policy.parallel=null", "critic.parallel=null", "reference.parallel=null", "rollout.engine=megatron")


def main(path: str, overrides: list[str]) -> None:
    config = load_config(path, [*overrides, *ALONE])
    device = select_device(config.run.device)
    start_alone(device)
    dispatch.select(config.kernels, device.type)
    data = plan_run(config, 1, device.type).data
    assert data is not None, "plan_run reads the data unless it is asked for shapes only"

    factory = RoleEngines(config.model, config.run.timeouts, device)
    roles = build_roles(config, factory, total_updates={"policy": 100, "critic": 100})
    sampling = sampling_params(config.rollout, data.tokenizer)
    rollout = rollout_of(config, data, roles.policy.engine, device)
    with roles.policy.engine.eval_mode():
        rollout.push_weights(0)

    # 1 prompts
    rows, repeats = data.loader.next_step(), config.rollout.samples_per_prompt
    requests = requests_of_step(data.train.prompts, rows, repeats, config.run.seed, step=1)
    # 2 generate: from here on a sample lives on one rank, as tokens [T] and cu_seqlens [B+1] of a packed batch
    experience = collect(requests, generate(rollout, requests, sampling))
    # 3 score
    with closing(scorer_of(config.reward, data.reward_parts)) as scorer:
        prompts = data.train.prompts
        scored = score_responses(experience, lambda i: prompts[rows[i // repeats]], data.tokenizer, scorer, sampling.stop)
    # 4 log-probs of policy and reference, values of the critic
    experience = add_model_outputs(experience, roles)
    # 5 KL-shaped rewards, GAE, whitening
    score, kl_coef = torch.tensor(scored.total), config.algorithm.kl.coef
    experience = add_advantages(experience, score, kl_coef, config.algorithm, scored.per_token).experience
    batch = experience.batch
    # 6 updates: the same mini-batches for critic and policy
    updates = Updates(experience, roles, ("critic", "policy"), config, seed=1)
    for name in ("critic", "policy"):
        updates.run(name)
        summary = updates.summary(name)
        print(f"{name}: {summary.num_updates} updates, gradient norm {summary.grad_norm:.4f}")
    # 7 push weights
    with roles.policy.engine.eval_mode():
        rollout.push_weights(1)
    # 8 log
    before, after = batch["logprob"], roles.policy.logprobs(batch, want_entropy=False)[0]
    mask, advantage = batch["response_mask"], batch["advantage"]
    better, worse = mask & (advantage > 0), mask & (advantage < 0)
    print(
        f"{batch.num_sequences} responses, {int(mask.sum())} sampled tokens, mean score {sum(scored.total) / len(scored.total):.3f}"
    )
    for name, chosen in (("positive", better), ("negative", worse)):
        print(f"mean change of log-prob where the advantage is {name}: {float((after - before)[chosen].mean()):+.5f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
