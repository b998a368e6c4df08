"""Files of a run's trajectories: RUN/trajectories/step_000010.jsonl, one JSON object per sample; keys in docs/telemetry.md.
`trainer/extras.py` writes them, `read.py` reads them; here they are found without opening them. Imports neither numpy nor
torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megappo.config.errors import ConfigError

FORMAT = 1
FOLDER = "trajectories"  # below the run's directory
# Lists with one number per response token, null where the policy did not sample it. Runs without a reference lack ref_logprob,
# those without a teacher teacher_logprob.
_LOGPROBS = ("logprob", "rollout_logprob", "ref_logprob", "teacher_logprob")
TOKEN_FIELDS = (*_LOGPROBS, "entropy", "value", "reward", "advantage", "returns")
# About half of fp32's digits are noise between two layouts, and a response of 1,000 tokens has 8,000 numbers.
DIGITS = 5


def rounded(numbers: Iterable[float]) -> list[float]:
    """Round numbers to DIGITS significant digits; NaN and infinities stay."""
    return [float(f"{number:.{DIGITS}g}") for number in numbers]


_NAME = re.compile(r"step_(\d{1,18})\.jsonl")
# By patterns of the text that `config/dump.py` writes, as in `commands/runs/read.py`.
_EVERY = re.compile(r"^  trajectories_every: (\d{1,18})$", re.MULTILINE)
_READS = re.compile(r"^    trajectories: (?!null$)", re.MULTILINE)


def files_by_step(run: Path) -> dict[int, Path]:
    """Map steps to files, of a run or a folder with the files alone. ConfigError, one line, if there is none."""
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    try:
        names = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except OSError as error:  # missing, a file, without permission
        raise ConfigError(f"{run}: {error.strerror}; name the directory of a run (run.output_dir/run.name)") from None
    files = {int(_NAME.fullmatch(path.name)[1]): path for path in names}  # type: ignore[index]
    if not files:
        raise ConfigError(f"{run} holds no trajectories: {_reason(run)}")
    return files


def _reason(run: Path) -> str:
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return f"it has neither {FOLDER}/ nor a config.yaml; name the directory of a run (run.output_dir/run.name)"
    found = _EVERY.search(text)
    if found is None:
        return "a fine-tuning (megappo sft) samples none"
    if _READS.search(text):
        return "a run on recorded trajectories (critic.warmup.trajectories) samples none; name the run that recorded them"
    if found[1] == "0":
        return "telemetry.trajectories_every is 0; telemetry.trajectories_every=10 writes them every 10 steps"
    return f"telemetry.trajectories_every is {found[1]}, and it has not come to that step; set it lower, or wait"
