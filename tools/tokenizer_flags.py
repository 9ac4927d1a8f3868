"""The flags of tools that make a tokenizer, and the tokenizer that they name."""

import argparse
from dataclasses import replace

from command_line import Parser

from megatron.config.arguments import add_to_parser
from megatron.config.megatron_config import section_problems
from megatron.config.options import Option, section_options
from megatron.config.problems import ConfigError, UserError
from megatron.config.tokenizer import TokenizerConfig
from megatron.tokenizer import Tokenizer, build_tokenizer

_MODEL_ONLY = {"make_vocab_size_divisible_by", "padded_vocab_size"}


def add_tokenizer_flags(parser: Parser, *, required: bool) -> None:
    options = (replace(option, required=option.required and required) for option in _options())
    add_to_parser(parser.add_argument_group("tokenizer"), options)


def named_tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """The tokenizer of the flags.

    Raises:
        UserError: they contradict each other, or a file is not there or damaged.
    """
    config = TokenizerConfig(**{option.field: getattr(arguments, option.field) for option in _options()})
    problems = [*section_problems(config), *config.file_problems()]
    if problems:
        raise ConfigError(problems)
    return build_tokenizer(config)


def tokenizer_if_named(arguments: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of the flags, None where none is given.

    Raises:
        UserError: as `named_tokenizer`; or only `--tokenizer-type` is missing.
    """
    if arguments.tokenizer_type is not None:
        return named_tokenizer(arguments)
    for option in _options():
        if getattr(arguments, option.field) != option.default and not option.required:
            raise UserError(f"{option.name}: is of a tokenizer, and --tokenizer-type does not say which")
    return None


def _options() -> list[Option]:
    return [option for option in section_options("tokenizer", TokenizerConfig) if option.field not in _MODEL_ONLY]
