"""Keys of the process: run, length, checkpoints, telemetry. The text under each field is its documentation (`schema.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megappo.config.paths import PathText
from megappo.config.section import NonNegative, Positive, PositiveFloat, Section


class TimeoutsConfig(Section):
    """Seconds that a rank waits for the others before it ends the run."""

    start_s: PositiveFloat = 600.0
    """Limit for joining the world, and for each exchange inside a pass until one step has updated every role (connections,
    compilation). Messages between pipeline stages over gloo, and exchanges of vLLM's ranks on their devices, always
    have it."""
    pass_s: PositiveFloat = 120.0
    """Limit for each exchange inside a forward or backward pass, an optimizer step or a push of weights after that. A rank that
    hangs there is noticed after this time."""
    meeting_s: PositiveFloat = 3600.0
    """Limit for waiting on the host for ranks whose work takes longer: generation, rewards, loading, vLLM's start,
    checkpoints, exports. Must exceed the longest response, reward or save; a rank that hangs there is noticed after this time."""
    heartbeat_s: PositiveFloat = 30.0
    """Limit for the silence of a rank: one that is stopped or dead, or whose interpreter is blocked, ends the run after this
    time, with a report and the stacks of all ranks."""
    section_s: PositiveFloat = 60.0
    """Least limit for one stage of a step, checkpoint or export. Its limit is `meeting_s` before its first run and between the
    stages, then at most the larger of `start_s` and 20 times the longest, and from its sixth run on the larger of this
    and 5 times the 99th percentile. A rank beyond it ends the run, as above."""


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$")] = "run"
    """Name of the run; everything is written to `output_dir/name`."""
    output_dir: PathText = "runs"
    """Directory that holds the runs."""
    seed: NonNegative = 0
    """Seed of sampling, shuffling and initialisation."""
    num_ranks: Positive | None = None
    """Ranks that `megappo train` starts on this machine; null means one per GPU, or 1. Under torchrun and srun it must match the
    world."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the models; auto takes CUDA if it is available."""
    permissions: Literal["private", "group", "world"] = "group"
    """Readers of the run's files, among them trajectories and checkpoints: the owner alone, also the group, or everybody. Only the
    owner writes (umask 077, 027, 022)."""
    timeouts: TimeoutsConfig = TimeoutsConfig()
    """Limits on the time that ranks wait for each other."""
    replica_check_every: NonNegative = 100
    """Steps between comparisons of the weights that several ranks hold copies of, bit for bit; a difference ends the run (exit
    code 17). 0 turns them off."""


class TrainerConfig(Section):
    epochs: Positive = 1
    """Passes over the training prompts."""
    steps: Positive | None = None
    """PPO steps; null means `epochs` full passes."""
    eval_every: NonNegative = 10
    """Steps between validations on `data.eval` (greedy) and on the sets of `evaluations` without an `every` of their own; the last
    step validates too. 0 turns validation off."""
    eval_before: bool = True
    """Validate before the first step; a set of `evaluations` may say otherwise."""
    evaluate_with: Literal["policy", "ema"] = "policy"
    """Weights that validations and `evaluations` sample from: the policy's, or their moving average (`policy.ema`), which is pushed
    for them, and the policy's again after them."""
    keep_best: str | None = None
    """Metric of an evaluation (`eval/score`, `eval/NAME/pass@4`; `eval/NAME` is its mean@N): the checkpoint with the largest
    value so far, or the smallest with `min eval/...`, is saved at once and kept beside `checkpoint.keep_last`. Of equal
    ones the earlier is the best."""


class CheckpointConfig(Section):
    save_every: Literal["auto", "epoch", "never"] | NonNegative = "auto"
    """Steps between checkpoints, besides the one at the end; 0: at the end only. auto: after the first step, then at the
    interval that costs least (docs/checkpoints.md), at most 30 minutes. epoch: after each pass over the prompts. never:
    only at a stop, and at an error that leaves the state whole."""
    keep_last: Positive = 3
    """Checkpoints kept; older ones are removed after a newer one is complete."""
    save_only_model: bool = False
    """Save weights without optimizer, RNG and cursor: smaller, but not resumable."""
    asynchronous: bool = True
    """Copy the state to host memory and write it from there while training goes on, instead of waiting for the disk. A rank's copy
    takes as much host memory as its share of the checkpoint (`megappo plan` says how much); false takes none."""
    remote: PathText | None = None
    """Other storage for copies of the checkpoints, as an fsspec URL (`s3://bucket/path`, `file:///mnt/backup`): each goes to
    `remote/run.name/step-N` after it is complete, beside training. Nothing is removed there; credentials come from the
    environment."""
    export_at_end: bool = True
    """Write the final policy as a Hugging Face checkpoint to `export/` in the run directory."""


class TelemetryConfig(Section):
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Places besides metrics.jsonl that show the run: TensorBoard, Weights & Biases, MLflow. Keys, addresses and projects come
    from these libraries' own environment variables; with WANDB_MODE=offline, and without MLFLOW_TRACKING_URI, records
    stay in the run directory (docs/telemetry.md)."""
    histograms_every: NonNegative = 10
    """Steps between histograms of advantages, returns, values, KL, ratios and lengths in the trackers, the last step among them; 0
    makes none."""
    trajectories_every: NonNegative = 10
    """Steps between full trajectories; 0 writes none."""
    trajectories_per_step: Positive = 8
    """Number of trajectories to write at such a step: all samples of prompts that are drawn by `run.seed` and the step."""
    progress: tuple[str, ...] = ()
    """Metrics in the line that every step prints, by name (docs/telemetry.md), for example
    `[reward/score_mean, perf/mfu/update_policy]`; empty for score, evaluation, KL, entropy, length, value loss, explained variance,
    tokens/s and seconds."""
    summary_every: NonNegative = 50
    """Steps between blocks of statistics on the console, each over the steps since the last one, and one at the end
    (docs/telemetry.md); 0 prints none."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one rank, which MFU is measured against. null takes it from the profile of the GPU, for the role's dtype
    (`megappo/telemetry/hardware.yaml`); a CPU and a GPU without a profile have no MFU then."""
    profile_steps: tuple[Positive, ...] = ()
    """Steps to profile: torch's trace of each, with the stages named, of every rank in the run's `profile/`. A profiled step is
    slower than others."""

    @property
    def histogram_interval(self) -> int:
        """Steps between histograms; 0 if no tracker shows them."""
        return self.histograms_every if self.trackers else 0
