"""Configuration: frozen data, the flags and files it is read from, and the rules it must keep."""

from megatron.config.arguments import parse_arguments
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.data_parallel import DataParallelConfig
from megatron.config.logging import LoggingConfig
from megatron.config.megatron_config import Difference, MegatronConfig, difference, section_problems
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.problems import ConfigError, Problem
from megatron.config.tokenizer import TokenizerConfig, padded_vocab_size
from megatron.config.training import TrainingConfig
from megatron.config.transformer import TransformerConfig

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DataParallelConfig",
    "Difference",
    "LoggingConfig",
    "MegatronConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Problem",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformerConfig",
    "difference",
    "padded_vocab_size",
    "parse_arguments",
    "section_problems",
]
