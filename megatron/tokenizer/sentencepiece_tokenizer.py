"""Adapter of the `sentencepiece` library."""

from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from megatron.config.problems import UserError
from megatron.tokenizer.tokenizer import WithoutSentencePairs, check_text, digest, read_tokenizer_file

# SentencePiece writes a space as U+2581 and reads every U+2581 back as a space, so a text that has the
# character itself does not survive. A model with this control symbol (tools/train_tokenizer.py makes such)
# has the character written as its three bytes, which any reader of the model decodes rightly. Other models
# keep the behaviour they were trained for.
SPACE_SYMBOL = "\u2581"
LITERAL_SPACE_SYMBOL = "<|u2581|>"

END_OF_DOCUMENT_PIECES = ("<|endoftext|>", "</s>", "<eod>", "<EOD>")


class SentencePieceTokenizer(WithoutSentencePairs):
    """A SentencePiece model as it is in its file: no token is added to it, and ids come from the model.

    Args:
        model_file: path of a `.model` file.
        name: the `--tokenizer-type` it was asked for by.

    Raises:
        UserError: no file, not a SentencePiece model, or a model without an end-of-document piece.
    """

    def __init__(self, model_file: str | Path, *, name: str = "SentencePieceTokenizer") -> None:
        model = read_tokenizer_file(
            model_file, flag="--tokenizer-model", tokenizer_type=name, what="a SentencePiece .model file"
        )
        try:
            if not model:  # the library takes no model for one that comes later
                raise RuntimeError("it is empty")
            self._processor = SentencePieceProcessor(model_proto=model)
        except (RuntimeError, UnicodeDecodeError) as error:  # the latter when its message quotes a broken piece
            raise UserError(
                f"--tokenizer-model {model_file} is not a SentencePiece model ({error}); "
                "a tokenizer.json is read by --tokenizer-type HuggingFaceTokenizer"
            ) from None
        self.name = name
        self.vocab_size = int(self._processor.vocab_size())
        self.pad = _known(self._processor.pad_id())
        self.eod = self._find_eod(model_file)
        self._literal_space_ids = self._find_literal_space_ids()
        self._fingerprint = digest("sentencepiece", model)

    def token_id(self, token: str) -> int | None:
        found = int(self._processor.piece_to_id(token))  # an unknown piece gets the id of <unk>
        return found if self._processor.id_to_piece(found) == token else None

    def is_special(self, token_id: int) -> bool:
        return bool(self._processor.is_control(token_id))

    def encode(self, text: str) -> list[int]:
        check_text(text)
        if self._literal_space_ids is None or SPACE_SYMBOL not in text:
            return list(self._processor.encode(text))
        ids: list[int] = []
        for index, part in enumerate(text.split(SPACE_SYMBOL)):
            if index > 0:
                ids.extend(self._literal_space_ids)
            ids.extend(self._processor.encode(part))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(token) for token in ids]))

    def fingerprint(self) -> str:
        return self._fingerprint

    def _find_eod(self, model_file: str | Path) -> int:
        eos = _known(self._processor.eos_id())
        if eos is not None:
            return eos
        for piece in END_OF_DOCUMENT_PIECES:
            token = self.token_id(piece)
            if token is not None:
                return token
        raise UserError(
            f"--tokenizer-model {model_file} has no end-of-document piece: neither an eos_id nor one of "
            f"{', '.join(END_OF_DOCUMENT_PIECES)}; train it with one (tools/train_tokenizer.py does)"
        )

    def _find_literal_space_ids(self) -> list[int] | None:
        if self.token_id(LITERAL_SPACE_SYMBOL) is None:
            return None
        pieces = [self.token_id(f"<0x{byte:02X}>") for byte in SPACE_SYMBOL.encode()]
        ids = [piece for piece in pieces if piece is not None]
        return ids if len(ids) == len(pieces) else None


def _known(token: int) -> int | None:
    return token if token >= 0 else None
