"""Mistakes in `evaluations` and `trainer.keep_best`, for the table of `test_checks.py`."""

SETS = "evaluations={a: {data: a.jsonl}, b: {data: b.jsonl, n: 4, temperature: 0.6}}"
RULE = "evaluation_problem"
# rule, overrides that break it, what the message must contain, one override more that mends it
CASES = [
    (
        RULE,
        ["evaluations={a b: {data: a.jsonl}}"],
        ['evaluations = "a b": is no name', "letters, digits"],
        "evaluations={a-b: {data: a.jsonl}}",
    ),
    (RULE, ["evaluations={score: {data: a.jsonl}}"], ['evaluations = "score"', "eval/score is a metric"], SETS),
    (
        RULE,
        ["data.eval=e.jsonl", "evaluations={exact_match: {data: a.jsonl}}"],
        ["eval/exact_match is a metric of data.eval; give the set another name"],
        "data.eval=null",
    ),
    (RULE, [SETS, "evaluations.b.temperature=0"], ["evaluations.b.n = 4", "greedy responses"], "evaluations.b.n=1"),
    (RULE, [SETS, "evaluations.a.top_p=0.9"], ["evaluations.a.top_p = 0.9: has no effect"], "evaluations.a.temperature=1"),
    (RULE, [SETS, "evaluations.a.top_k=5"], ["evaluations.a.top_k = 5: has no effect"], "evaluations.a.temperature=1"),
    (RULE, [SETS, "evaluations.b.top_k=0"], ["evaluations.b.top_k = 0", "-1 for all"], "evaluations.b.top_k=3"),
    (RULE, [SETS, "evaluations.b.pass_at=[1,8]"], ["evaluations.b.pass_at = [1, 8]: pass@8 needs n >= 8"], "evaluations.b.n=8"),
    (RULE, [SETS, "evaluations.b.pass_at=[2,2]"], ["names a K twice"], "evaluations.b.pass_at=[2]"),
    (
        RULE,
        [SETS, "evaluations.a.every=0", "evaluations.a.before=false"],
        ["evaluations.a.every is 0 and before is false, so nothing is evaluated"],
        "evaluations.a.before=true",
    ),
    (
        RULE,
        [SETS, "trainer.eval_every=0", "trainer.eval_before=false"],
        ["trainer.eval_every is 0 and before is false", "set evaluations.a.every"],
        "trainer.eval_every=5",
    ),
    (
        RULE,
        [SETS, "evaluations.a.reward={above_max: redraw}"],
        ['evaluations.a.reward.above_max = "redraw": has no effect'],
        "evaluations.a.reward=null",
    ),
    (RULE, ["trainer.keep_best=eval/score"], ['keep_best = "eval/score": nothing is evaluated'], "data.eval=e.jsonl"),
    (
        RULE,
        [SETS, "trainer.keep_best=eval/b/mean@1"],
        ['trainer.keep_best = "eval/b/mean@1": is no metric', "did you mean eval/b/mean@4? Metrics: eval/a/mean@1, eval/a/pass@1"],
        "trainer.keep_best=eval/b/mean@4",
    ),
    (RULE, [SETS, "trainer.keep_best=eval/score"], ["is no metric of an evaluation"], "data.eval=e.jsonl"),
    (RULE, [SETS, "trainer.keep_best=min eval/b/len"], ["did you mean eval/b/length?"], "trainer.keep_best=min eval/b/length"),
    (RULE, [SETS, "trainer.keep_best=b"], ["is no metric of an evaluation"], "trainer.keep_best=eval/b"),
    (
        RULE,
        [SETS, "trainer.keep_best=eval/a", "evaluations.a.every=0"],
        ["evaluations.a.every is 0, so no step is evaluated"],
        "evaluations.a.every=1",
    ),
    (
        RULE,
        ["data.eval=e.jsonl", "trainer.keep_best=eval/exact_match", "trainer.eval_every=0"],
        ["trainer.eval_every is 0, so no step is evaluated; set it"],
        "trainer.eval_every=3",
    ),
    (
        "evaluation_reward_problem",
        [SETS, "evaluations.b.reward={parts: []}"],
        ["evaluations.b.reward.parts = []: a run needs a reward"],
        "evaluations.b.reward=null",
    ),
    (
        "evaluation_reward_problem",
        [SETS, "evaluations.b.reward={length_penalty: {per_token: 0.1, start: 9}}", "evaluations.b.max_response_tokens=9"],
        ["evaluations.b.reward.length_penalty.start = 9"],
        "evaluations.b.max_response_tokens=10",
    ),
]
