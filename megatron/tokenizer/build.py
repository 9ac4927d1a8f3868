"""From the tokenizer's configuration to the tokenizer."""

from collections.abc import Callable

from megatron.config.problems import UserError
from megatron.config.tokenizer import TokenizerConfig, TokenizerType
from megatron.tokenizer.plain_tokenizers import ByteTokenizer, NullTokenizer
from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.tokenizer.tiktoken_tokenizer import TikTokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tokenizer.tokenizers_tokenizer import gpt2_bpe_tokenizer, huggingface_tokenizer
from megatron.tokenizer.wordpiece_tokenizer import wordpiece_tokenizer


def _sentencepiece(config: TokenizerConfig) -> Tokenizer:
    # The three names differ in Megatron-LM's past (one added <CLS>, <SEP>, <EOD> and <MASK>); a model is what it is.
    assert config.tokenizer_model is not None
    return SentencePieceTokenizer(config.tokenizer_model, name=config.tokenizer_type)


def _gpt2_bpe(config: TokenizerConfig) -> Tokenizer:
    assert config.vocab_file is not None and config.merge_file is not None
    return gpt2_bpe_tokenizer(config.vocab_file, config.merge_file)


def _huggingface(config: TokenizerConfig) -> Tokenizer:
    assert config.tokenizer_model is not None
    return huggingface_tokenizer(
        config.tokenizer_model, include_special_tokens=config.tokenizer_hf_include_special_tokens
    )


def _wordpiece(config: TokenizerConfig) -> Tokenizer:
    assert config.vocab_file is not None
    return wordpiece_tokenizer(
        config.vocab_file,
        name=config.tokenizer_type,
        lower_case=config.tokenizer_type == "BertWordPieceLowerCase",
        include_special_tokens=config.tokenizer_hf_include_special_tokens,
    )


def _tiktoken(config: TokenizerConfig) -> Tokenizer:
    assert config.tokenizer_model is not None
    return TikTokenizer(
        config.tokenizer_model,
        pattern=config.tiktoken_pattern,
        num_special_tokens=config.tiktoken_num_special_tokens,
        special_tokens=config.tiktoken_special_tokens,
        vocab_size=config.vocab_size,
    )


def _null(config: TokenizerConfig) -> Tokenizer:
    assert config.vocab_size is not None
    return NullTokenizer(config.vocab_size, eod_id=config.null_tokenizer_eod_id, pad_id=config.null_tokenizer_pad_id)


def _byte(config: TokenizerConfig) -> Tokenizer:
    return ByteTokenizer()


_BUILDERS: dict[TokenizerType, Callable[[TokenizerConfig], Tokenizer]] = {
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "GPT2BPETokenizer": _gpt2_bpe,
    "HuggingFaceTokenizer": _huggingface,
    "BertWordPieceLowerCase": _wordpiece,
    "BertWordPieceCase": _wordpiece,
    "TikTokenizer": _tiktoken,
    "NullTokenizer": _null,
    "ByteTokenizer": _byte,
}


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration that keeps its rules, from local files only.

    Raises:
        UserError: a malformed file, or a `--vocab-size` that is not the tokenizer's.
    """
    tokenizer = _BUILDERS[config.tokenizer_type](config)
    if config.vocab_size is not None and config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size {config.vocab_size} contradicts --tokenizer-type {tokenizer.name}, whose files have "
            f"{tokenizer.vocab_size} ids; leave --vocab-size out, or make the model's vocabulary larger with "
            "--padded-vocab-size"
        )
    return tokenizer
