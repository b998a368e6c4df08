"""Package metadata. The exact versions that are tested together are pinned in requirements/."""

import ast
from pathlib import Path

from setuptools import find_packages, setup

source = ast.parse(Path(__file__).with_name("megappo").joinpath("__init__.py").read_text())
version = next(node.value.value for node in source.body if isinstance(node, ast.Assign) and node.targets[0].id == "__version__")

setup(
    name="megappo",
    version=version,
    description="Tensor- and pipeline-parallel PPO for large language models: Megatron-core shards, vLLM rollouts, one SPMD program",
    packages=find_packages(include=["megappo", "megappo.*"]),
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1",
        "einops",
        "numpy",
        "psutil",
        "pydantic>=2.12",
        "pyyaml",
        "safetensors>=0.6.2",
        "sentencepiece",
        "tensorboard",
        "transformers>=5.16.1,<5.20",
    ],
    extras_require={
        "vllm": ["vllm>=0.26,<0.33"],
        "gpu": ["transformer-engine[pytorch]>=2"],
        "math": ["math-verify>=0.9"],
        "datasets": ["datasets", "pyarrow"],
        "test": ["pytest", "hypothesis"],
    },
    entry_points={"console_scripts": ["megappo = megappo.cli:main"]},
)
