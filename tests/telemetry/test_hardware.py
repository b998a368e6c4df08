"""Profiles of GPUs found by the name that torch gives a device."""

import pytest

from megappo.telemetry.hardware import hardware_of_gpu


@pytest.mark.parametrize(
    "name, profile",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        # Other peaks than the data sheets of the profiles.
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A10", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_a_gpu_has_the_profile_of_its_kind(name: str, profile: str | None) -> None:
    found = hardware_of_gpu(name)
    assert (None if found is None else found.name) == profile
    assert found is None or found.peak_tflops("bf16") > found.peak_tflops("fp32")
