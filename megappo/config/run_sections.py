"""Keys of the process: run, length, checkpoints, telemetry. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megappo.config.paths import PathIfThere, PathText
from megappo.config.section import NonNegative, Positive, PositiveFloat, Section


class TimeoutsConfig(Section):
    """Seconds that a rank waits for the others before it ends the run."""

    start_s: PositiveFloat = 600.0
    """For joining the world, and for an exchange inside a pass until one step has updated every role. Pipeline messages over
    gloo and vLLM's device exchanges always have it. While models load, and in a stage's first five runs, also for time in which
    no rank works: uses its processor, reads, writes or waits for a disk. It must exceed the silence of a remote judge."""
    pass_s: PositiveFloat = 120.0
    """For an exchange inside a forward or backward pass, an optimizer step or a push of weights after that."""
    meeting_s: PositiveFloat = 3600.0
    """For waiting on the host for work that takes longer: generation, rewards, loading, vLLM's start, checkpoints,
    exports."""
    heartbeat_s: PositiveFloat = 30.0
    """For the silence of a rank: one that is stopped, dead or blocked ends the run, with a report and the stacks of all
    ranks. So does one beyond the limit of a stage, checkpoint or export: `meeting_s` before its first run and between stages,
    then max(`start_s`, 20 times the longest), from the sixth run on max(2 `heartbeat_s`, 5 times the 99th percentile)."""


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")] = "run"
    """Name of the run; its files are in `output_dir/name`."""
    output_dir: PathText = "runs"
    """Directory that holds the runs."""
    seed: NonNegative = 0
    """Seed of sampling, shuffling and initialisation."""
    num_ranks: Positive | None = None
    """Ranks that `megappo train` starts here; null means one per GPU, or 1. Under torchrun and srun it must match the
    world."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; auto takes CUDA if it is available."""
    permissions: Literal["private", "group", "world"] = "group"
    """Readers of the run's files, trajectories and checkpoints included: owner, also the group, or everybody (umask 077, 027,
    022). Only the owner writes."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Limits on the time that ranks wait for each other, in seconds."""
    replica_check_every: NonNegative = 100
    """Steps between bit-for-bit comparisons of weights that several ranks hold; a difference ends the run (exit code 17). 0:
    none."""


class TrainerConfig(Section):
    epochs: Positive = 1
    """Passes over the training prompts."""
    steps: Positive | None = None
    """PPO steps; null means `epochs` full passes."""
    eval_every: NonNegative = 10
    """Steps between validations on `data.eval` and on sets of `evaluations` without an `every`; the last step validates too.
    0: none."""
    eval_before: bool = True
    """Validate before the first step."""
    evaluate_with: Literal["policy", "ema"] = "policy"
    """Weights that evaluations sample from: the policy's, or their moving average (`policy.ema`), pushed for them."""
    keep_best: str | None = None
    """Metric of an evaluation (`eval/score`, `eval/NAME/pass@4`; `eval/NAME` is its mean@N) whose best checkpoint is kept
    beside `checkpoint.keep_last`: the largest, or the smallest with `min eval/...`; the earlier of equal ones."""


class CheckpointConfig(Section):
    save_every: Literal["auto", "epoch", "never"] | NonNegative = "auto"
    """Steps between checkpoints, besides the last; 0: the last only. auto: after the first step, then at the cheapest
    interval, at most 30 minutes (docs/checkpoints.md). epoch: after each pass over the prompts. never: only at a stop, or an
    error that leaves the state whole."""
    keep_last: Positive = 3
    """Checkpoints kept; older ones go once a newer one is complete."""
    save_only_model: bool = False
    """Save weights without optimizer, RNG and cursor: smaller, but not resumable."""
    asynchronous: bool = True
    """Copy the state to host memory (`megappo plan` says how much) and write it while training goes on; false waits for the
    disk."""
    remote: PathText | None = None
    """Storage for copies, an fsspec URL (`s3://bucket/path`, `file:///mnt/backup`): each complete checkpoint goes to
    `remote/run.name/step-N` beside training. Nothing is removed there; credentials come from the environment."""
    export_at_end: bool = True
    """Write the final policy as a Hugging Face checkpoint to the run's `export/`."""


class TelemetryConfig(Section):
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """What shows the run besides metrics.jsonl; accounts come from the libraries' own environment variables
    (docs/telemetry.md)."""
    histograms_every: NonNegative = 10
    """Steps between histograms in the trackers (docs/telemetry.md); the last step has them too. 0: none."""
    trajectories_every: NonNegative = 10
    """Steps between records of full trajectories; 0: none."""
    trajectories_per_step: Positive = 8
    """Trajectories at such a step: all samples of prompts drawn by `run.seed` and the step."""
    progress: tuple[str, ...] = ()
    """Metrics in the line of every step, such as `[reward/score_mean, perf/mfu/update_policy]`; empty takes the usual ones
    (docs/telemetry.md)."""
    summary_every: NonNegative = 50
    """Steps between blocks of statistics on the console, and one at the end (docs/telemetry.md); 0: none."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a rank for MFU; null takes the GPU's profile (`megappo/telemetry/hardware.yaml`), or there is no
    MFU."""
    hardware: PathIfThere | None = None
    """Profile of a rank, for MFU and the predicted seconds in the log: a name, or a YAML file as `megappo tune --as-is --calibrate
    RUN --output FILE` writes (docs/layouts.md); null takes that of the GPU."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps to profile: torch's trace of every rank in the run's `profile/` (docs/telemetry.md)."""

    @property
    def histogram_interval(self) -> int:
        """Steps between histograms; 0 if no tracker shows them."""
        return self.histograms_every if self.trackers else 0
