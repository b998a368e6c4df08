"""megappo: tensor- and pipeline-parallel PPO for large language models."""

__version__ = "0.1.0"
