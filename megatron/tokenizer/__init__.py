"""Tokenizers: one small adapter a library, one `build_tokenizer`."""

from megatron.tokenizer.build import TOKENIZER_TYPES, build_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer"]
