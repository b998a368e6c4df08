"""No silent knob: every key of the schema is read by something that acts on it, not only by checks, plans and measurements."""

import ast
import functools
from pathlib import Path

import megappo
from megappo.config.keys import value_keys
from megappo.config.schema import TrainConfig
from megappo.config.supervised import KINDS

PACKAGE = Path(megappo.__file__).parent
# Folders that check, plan or measure: a key that only they read changes no run.
INSTRUMENTS = ("config/", "trainer/prepare/", "commands/plan/", "commands/verify/")
# Read through a function of config/ or prepare/ that the trainer calls.
READ_THROUGH = {
    "output_dir": "checks.run_dir_of",
    "allow_hosts": "checks.check_config, which refuses the run: that is all it is for",
    "max_staleness": "config.schema.RolloutConfig.oldest_weights",
    "checkpoint_role": "prepare.critic_source.critic_source",
    "whiten_advantages": "config.schema.AlgorithmConfig.whitens",
    "count_rejected": "config.schema.AlgorithmConfig.drops_rejected",
    "proximal": "config.schema.AlgorithmConfig.old_logprob",
    "min_ratio": "config.role_sections.OptimizerConfig.min_lr",
    "trajectories": "config.role_sections.CriticConfig.warmup_trajectories",
    "histograms_every": "config.run_sections.TelemetryConfig.histogram_interval",
}


def attributes_read(folders_left_out: tuple[str, ...]) -> set[str]:
    """Names of all attributes that the package reads outside these folders."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if not path.relative_to(PACKAGE).as_posix().startswith(folders_left_out):
            names |= attributes_in(path)
    return names


@functools.cache
def attributes_in(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))


def test_every_key_is_read_outside_checks_plans_and_measurements():
    read = attributes_read(INSTRUMENTS) | set(READ_THROUGH)
    # They make what the trainer trains and evaluates on, and its schedules of updates.
    made = [f"trainer/prepare/{name}.py" for name in ("data", "images", "recorded", "supervised")]
    for name in (*made, "config/evaluations.py", "config/batch.py"):
        read |= {n.attr for n in ast.walk(ast.parse((PACKAGE / name).read_text())) if isinstance(n, ast.Attribute)}
    unread = [key for cls in (TrainConfig, *KINDS.values()) for key, _ in value_keys(cls) if key.rsplit(".", 1)[-1] not in read]
    assert not unread, f"nobody reads {unread}"


def test_a_key_that_nobody_reads_would_be_seen():
    """Negative control."""
    assert "a_key_that_nobody_reads" not in attributes_read(INSTRUMENTS)
    assert "lam_length_alpha" in attributes_read(INSTRUMENTS)
