"""Tokenizers: one small adapter a library, one `build_tokenizer`."""

from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "build_tokenizer"]
