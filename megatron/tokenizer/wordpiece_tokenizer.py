"""BERT's WordPiece from a vocab.txt, through the `tokenizers` library."""

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing

from megatron.config.problems import UserError
from megatron.tokenizer.tokenizer import digest, read_tokenizer_file
from megatron.tokenizer.tokenizers_tokenizer import TokenizersTokenizer

UNKNOWN = "[UNK]"
SPECIAL_TOKENS = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]"}


def wordpiece_tokenizer(
    vocab_file: str | Path, *, name: str, lower_case: bool, include_special_tokens: bool
) -> TokenizersTokenizer:
    """BERT's tokenizer; [SEP] ends a document, as nothing else in its vocabulary could.

    Args:
        vocab_file: one token a line, whose number from 0 is its id; "##" begins what continues a word.
        lower_case: lower-case the text and strip its accents (the "uncased" models).
        include_special_tokens: put [CLS] before a text and [SEP] after it.

    Raises:
        UserError: no such file, not a list of different tokens, or one of the special tokens is not in it.
    """
    source = f"--vocab-file {vocab_file}"
    content = read_tokenizer_file(
        vocab_file, flag="--vocab-file", tokenizer_type=name, what="vocab.txt, one token a line"
    )
    vocabulary = read_vocabulary(content, source=source)
    missing = [token for token in (UNKNOWN, *SPECIAL_TOKENS.values()) if token not in vocabulary]
    if missing:
        raise UserError(
            f"{source} has no {', '.join(missing)}: --tokenizer-type {name} reads BERT's vocab.txt, in which "
            f"{', '.join((UNKNOWN, *SPECIAL_TOKENS.values()))} are lines of their own"
        )
    backend = Backend(WordPiece(vocabulary, unk_token=UNKNOWN))
    backend.normalizer = BertNormalizer(lowercase=lower_case)
    backend.pre_tokenizer = BertPreTokenizer()
    backend.decoder = WordPieceDecoder()
    backend.post_processor = BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    backend.add_special_tokens([UNKNOWN, *SPECIAL_TOKENS.values()])
    return TokenizersTokenizer(
        backend,
        name=name,
        special={"eos": "[SEP]", **SPECIAL_TOKENS},
        eod_error="",
        source=source,
        include_special_tokens=include_special_tokens,
        fingerprint=digest("wordpiece", content, str(lower_case)),
    )


def read_vocabulary(content: bytes, *, source: str) -> dict[str, int]:
    """Token to id, of the bytes of a vocab.txt.

    Raises:
        UserError: not UTF-8, an empty line or a token that comes twice, either of which would shift or hide ids.
    """
    try:
        lines = content.decode().removesuffix("\n").split("\n")  # other line separators of Unicode may be tokens
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not a vocab.txt: byte {error.start + 1} is not valid UTF-8") from None
    vocabulary: dict[str, int] = {}
    for token_id, line in enumerate(lines):
        token = line.removesuffix("\r")
        if not token:
            raise UserError(f"{source}: line {token_id + 1} is empty; a vocab.txt has one token a line")
        first = vocabulary.setdefault(token, token_id)
        if first != token_id:
            raise UserError(
                f"{source}: {token!r} stands in line {first + 1} and again in line {token_id + 1}; each token has "
                "one id, so each line of a vocab.txt must differ from the others"
            )
    return vocabulary
