"""Small configurations that the tests of config/ start from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megappo.config.loading import load_config
from megappo.config.schema import TrainConfig
from megappo.config.supervised import DpoConfig, RewardTrainingConfig, SftConfig

TRAIN = "policy: {model: some/model}\ndata: {train: train.jsonl}\n"
SFT = "policy: {model: some/model}\ndata: {train: train.jsonl}\ntrainer: {steps: 100}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def train_config(folder: Path, overrides: Sequence[str] = (), text: str = TRAIN) -> TrainConfig:
    return load_config(write(folder, text), overrides)


def reward_config(folder: Path, overrides: Sequence[str] = ()) -> RewardTrainingConfig:
    return load_config(write(folder, SFT.replace("policy:", "reward_model:")), overrides, RewardTrainingConfig)


def dpo_config(folder: Path, overrides: Sequence[str] = ()) -> DpoConfig:
    return load_config(write(folder, SFT), overrides, DpoConfig)


def sft_config(folder: Path, overrides: Sequence[str] = ()) -> SftConfig:
    return load_config(write(folder, SFT), overrides, SftConfig)
