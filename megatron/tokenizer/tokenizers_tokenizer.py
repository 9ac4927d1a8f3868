"""Adapter of the `tokenizers` library: GPT-2's vocabulary and merges, and any tokenizer.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel

from megatron.config.problems import UserError
from megatron.tokenizer.tokenizer import END_OF_DOCUMENT_TOKENS, check_text, digest, read_tokenizer_file

GPT2_END_OF_TEXT = "<|endoftext|>"


class TokenizersTokenizer:
    """A tokenizer of the `tokenizers` library with the ids of its special tokens looked up.

    A special token that stands literally in a text becomes its id, as in Megatron-LM; what the
    file's post-processor adds (a BOS, [CLS] ... [SEP]) is added. Truncation and padding that a tokenizer.json
    may ask for are switched off: they belong to inference, and would silently cut documents.

    Args:
        backend: the library's tokenizer; changed in place.
        special: which token is "eos", "pad", "cls", "sep", "mask"; a token not in the vocabulary is an error.
        eod_error: why there is no EOD, when `special` has no "eos".
        source: where it came from, for messages: flag and path.
        include_special_tokens: whether to add what the post-processor adds.
        fingerprint: of the files.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        name: str,
        special: Mapping[str, str],
        eod_error: str,
        source: str,
        include_special_tokens: bool,
        fingerprint: str,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.name = name
        # Ids may have holes, so the number of entries is not always the size an embedding needs.
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        ids = {role: self._require(token, role, source) for role, token in special.items()}
        self._eod = ids.get("eos")
        self._eod_error = eod_error
        self.pad = ids.get("pad")
        self.cls = ids.get("cls")
        self.sep = ids.get("sep")
        self.mask = ids.get("mask")
        self.continues_word = self._find_continuations()
        self.include_special_tokens = include_special_tokens
        self._fingerprint = fingerprint

    @property
    def eod(self) -> int:
        if self._eod is None:
            raise UserError(self._eod_error)
        return self._eod

    def token_id(self, token: str) -> int | None:
        found = self._backend.token_to_id(token)
        return None if found is None else int(found)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._backend.get_added_tokens_decoder()

    @property
    def surrounds_texts(self) -> bool:
        """Whether encoding puts tokens before or after those of a text, as BERT's [CLS] and [SEP]."""
        return self.include_special_tokens and self._backend.num_special_tokens_to_add(False) > 0

    def encode(self, text: str) -> list[int]:
        # The batch call of one text gives the ids of `encode` without its character offsets, a third faster.
        texts = [check_text(text)]
        (encoding,) = self._backend.encode_batch_fast(texts, add_special_tokens=self.include_special_tokens)
        return list(encoding.ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode([int(token) for token in ids], skip_special_tokens=False))

    def fingerprint(self) -> str:
        return self._fingerprint

    def tokenizer_json(self) -> str:
        """The whole tokenizer as a tokenizer.json, for other libraries that read it."""
        return str(self._backend.to_str())

    def _find_continuations(self) -> npt.NDArray[np.bool_] | None:
        model = self._backend.model
        if not isinstance(model, WordPiece):
            return None
        continues = np.zeros(self.vocab_size, dtype=np.bool_)
        for token, index in self._backend.get_vocab(with_added_tokens=False).items():
            continues[index] = token.startswith(model.continuing_subword_prefix)
        return continues

    def _require(self, token: str, role: str, source: str) -> int:
        found = self.token_id(token)
        if found is None:
            raise UserError(f"{source}: the {role} token {token!r} is not in the vocabulary")
        return found


def gpt2_bpe_tokenizer(vocab_file: str | Path, merge_file: str | Path) -> TokenizersTokenizer:
    """GPT-2's byte-level BPE from `vocab.json` and `merges.txt`; <|endoftext|> is EOD.

    Raises:
        UserError: a file is missing or malformed, <|endoftext|> or one of the 256 byte symbols is not in the
            vocabulary.
    """
    name = "GPT2BPETokenizer"
    vocab = read_tokenizer_file(
        vocab_file, flag="--vocab-file", tokenizer_type=name, what="vocab.json (encoder.json), token to id"
    )
    merges = read_tokenizer_file(merge_file, flag="--merge-file", tokenizer_type=name, what="merges.txt (vocab.bpe)")
    source = f"--vocab-file {vocab_file} --merge-file {merge_file}"
    try:
        model = BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{source}: not a byte-level BPE's vocabulary and merges ({error})") from None
    backend = Backend(model)
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    if backend.token_to_id(GPT2_END_OF_TEXT) is None:
        raise UserError(
            f"--vocab-file {vocab_file} has no {GPT2_END_OF_TEXT}, which ends a document; add it to the vocabulary, "
            "or describe the tokenizer in a tokenizer.json and use --tokenizer-type HuggingFaceTokenizer"
        )
    # The model has no unknown token: a byte without a symbol would vanish from the text without a word.
    missing = sorted(symbol for symbol in ByteLevel.alphabet() if backend.token_to_id(symbol) is None)
    if missing:
        raise UserError(
            f"--vocab-file {vocab_file} lacks {len(missing)} of the 256 byte symbols "
            f"({' '.join(missing[:8])} ...): text with those bytes would be lost; use the vocabulary of a "
            "byte-level BPE"
        )
    made = {line.removesuffix("\r").replace(" ", "") for line in merges.decode().split("\n")}
    unmade = [
        token for token in backend.get_vocab() if len(token) > 1 and token not in made and only_merges_make(token)
    ]
    if unmade:
        raise UserError(
            f"--merge-file {merge_file} has no merge for {len(unmade):,} of the {backend.get_vocab_size():,} tokens of "
            f"--vocab-file {vocab_file}, such as {min(unmade)!r}: lines are missing, or it is of another vocabulary; "
            "tokens that were put in beside the merges are described in a tokenizer.json (HuggingFaceTokenizer)"
        )
    backend.add_special_tokens([GPT2_END_OF_TEXT])
    return TokenizersTokenizer(
        backend,
        name=name,
        special={"eos": GPT2_END_OF_TEXT},
        eod_error="",
        source=source,
        include_special_tokens=True,
        fingerprint=digest("gpt2-bpe", vocab, merges),
    )


def only_merges_make(token: str) -> bool:
    """Whether a token of a byte-level BPE is of one word, or a part of one, as GPT-2 cuts texts.

    What was put in beside the merges, such as <pad>, [MASK] and madeupword0000, is of several, or is no bytes of text.
    """
    if not set(token) <= set(ByteLevel.alphabet()):
        return False
    # A token may begin and end within a character, which then shows as U+FFFD.
    text = ByteLevelDecoder().decode([token]).strip("\ufffd")
    return "\ufffd" not in text and len(ByteLevel(add_prefix_space=False).pre_tokenize_str(text)) <= 1


def huggingface_tokenizer(path: str | Path, *, include_special_tokens: bool = True) -> TokenizersTokenizer:
    """A `tokenizer.json`, or the folder that holds one; never a name on a hub.

    EOD is the eos_token of `tokenizer_config.json` or `special_tokens_map.json` beside the file; without it the
    one well-known end token of the vocabulary, when there is exactly one; without any the sep_token of those files.

    Raises:
        UserError: no such file, or files that disagree with each other.
    """
    name = "HuggingFaceTokenizer"
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file() and Path(path).is_dir():
        raise UserError(
            f"--tokenizer-model {path} holds no tokenizer.json. A folder with vocab.json and merges.txt is read by "
            "--tokenizer-type GPT2BPETokenizer --vocab-file ... --merge-file ..., one with a .model file by "
            "--tokenizer-type SentencePieceTokenizer --tokenizer-model ..., one with vocab.txt by "
            "--tokenizer-type BertWordPieceLowerCase (or BertWordPieceCase) --vocab-file ..."
        )
    content = read_tokenizer_file(file, flag="--tokenizer-model", tokenizer_type=name, what="a tokenizer.json")
    try:
        backend = Backend.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"--tokenizer-model {file} is not a tokenizer.json ({error})") from None
    beside = {
        sibling_name: sibling.read_bytes()
        for sibling_name in ("special_tokens_map.json", "tokenizer_config.json")
        if (sibling := file.parent / sibling_name).is_file()
    }
    special = _declared_special_tokens(file.parent, beside)
    eod_error = ""
    if "eos" not in special:
        found = [token for token in END_OF_DOCUMENT_TOKENS if backend.token_to_id(token) is not None]
        if len(found) == 1:
            special["eos"] = found[0]
        elif not found and "sep" in special:
            special["eos"] = special["sep"]
        eod_error = (
            f"--tokenizer-model {file} does not say which token ends a document: "
            f"{'it has ' + ' and '.join(found) if found else 'none of the usual ones is in it'}; "
            'write {"eos_token": "..."} to tokenizer_config.json beside it'
        )
    return TokenizersTokenizer(
        backend,
        name=name,
        special=special,
        eod_error=eod_error,
        source=f"--tokenizer-model {file}",
        include_special_tokens=include_special_tokens,
        fingerprint=digest("tokenizers", _meaning(content), json.dumps(special, sort_keys=True)),
    )


def _meaning(tokenizer_json: bytes) -> str:
    """What decides about ids: neither white space nor how texts were once cut or filled to a length."""
    content = json.loads(tokenizer_json)
    return json.dumps({key: content[key] for key in content if key not in ("padding", "truncation")}, sort_keys=True)


def _declared_special_tokens(folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Role to token, from the files beside a tokenizer.json; tokenizer_config.json has the last word."""
    special: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if name not in files:
            continue
        try:
            declared = json.loads(files[name])
        except ValueError as error:
            raise UserError(f"--tokenizer-model: {folder / name} is not JSON ({error})") from None
        for role in ("eos", "pad", "cls", "sep", "mask"):
            token = declared.get(f"{role}_token") if isinstance(declared, dict) else None
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str):
                special[role] = token
    return special
