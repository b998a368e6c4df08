"""Write docs/metrics.md from the catalogue in `metrics.py`: `python -m megappo.commands.docs_metrics [repository root]`.

Names and meanings come from the catalogue. A test asserts that the written page is current."""

from __future__ import annotations

import sys
from pathlib import Path

from megappo.telemetry.metrics import GROUPS, STAGES, Metric

PAGE = "docs/metrics.md"
HEAD = """# Metrics

Generated from `megappo/telemetry/metrics.py` by `python -m megappo.commands.docs_metrics`; change the text there.

Every name that a run can log. `metrics.jsonl` has one JSON object for each step: `step`, `time` (seconds since 1970) and the
metrics of that step. TensorBoard, W&B and MLflow show the same names.

- A run logs what its configuration has. Without a critic there are no `critic/...`, without experts no `.../expert_max_violation`.
- A `*` stands for several names; the text says which. STAGE is one of STAGES_OF_A_STEP.
- Metrics of the critic `b` of `critics` are those of `critic` with another beginning: `critic_b/loss`.
- All numbers are of the whole step over all ranks, so they do not depend on the layout. Times and rates are rank 0's.
- A number that is not finite is `null` in `metrics.jsonl`.

What to watch first, and what a bad value means: [troubleshooting](troubleshooting.md#the-curve-looks-wrong). Console and rates:
[statistics](telemetry.md). Histograms: [telemetry](telemetry.md#histograms). In Python:

```python
import json

steps = [json.loads(line) for line in open("runs/quickstart/ppo/metrics.jsonl")]
print([step["kl/per_token"] for step in steps if "kl/per_token" in step])
```
"""


def group_of(metric: Metric) -> str:
    return metric.value.split("/", 1)[0]


def cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bar would end the cell


def page() -> str:
    lines = [HEAD.replace("STAGES_OF_A_STEP", ", ".join(f"`{stage}`" for stage in STAGES))]
    for group, text in GROUPS.items():
        lines += [f"## {group}", "", text, "", "| metric | meaning |", "|---|---|"]
        members = [metric for metric in Metric if group_of(metric) == group]
        lines += [f"| `{metric.value}` | {cell(metric.meaning)} |" for metric in members]
        lines += [""]
    return "\n".join(lines)


def main(root: Path) -> None:
    (root / PAGE).write_text(page(), encoding="utf-8")
    print(root / PAGE)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
