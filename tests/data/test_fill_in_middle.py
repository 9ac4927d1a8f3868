"""Filling in the middle: what is moved, that no text is lost, and what a training makes of it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron.config import parse_arguments
from megatron.config.data import DataConfig
from megatron.config.problems import UserError
from megatron.data.fill_in_middle import FillInTheMiddleDataset, MiddleMover
from megatron.tokenizer.plain_tokenizers import ByteTokenizer, NullTokenizer
from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.tokenizer.tokenizers_tokenizer import TokenizersTokenizer, huggingface_tokenizer
from megatron.training.data_loaders import Datasets, SampleCounts
from megatron.training.fill_in_middle import middle_mover, ordinary_marks
from megatron.training.gpt import gpt_datasets
from megatron.training.setup import build_vocabulary
from tests.data.corpora import write_corpus
from tests.helpers.tiny import TINY_GPT, context_of_rank

MARKS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>")
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with two merges, of "ab" and "abab", and the tokens of filling in the middle."""
    symbols = sorted(ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, "ab", "abab"])}
    backend = Backend(BPE(vocabulary, [("a", "b"), ("ab", "ab")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([END, *MARKS])
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TokenizersTokenizer:
    return huggingface_tokenizer(folder)


def mover(tokenizer: TokenizersTokenizer, **settings: object) -> MiddleMover:
    return middle_mover(DataConfig(seq_length=8, fim_data=True, **settings), tokenizer)  # type: ignore[arg-type]


def ids_of(tokenizer: TokenizersTokenizer, *documents: str) -> np.ndarray:
    """Documents, each but the last with its end."""
    return np.array(tokenizer.encode(END.join(documents)), dtype=np.uint16)


def put_back(text: str) -> str:
    """A document whose middle was moved, as it was."""
    prefix_mark, middle_mark, suffix_mark, _ = MARKS
    if not text.startswith(prefix_mark):
        return text
    if text.startswith(prefix_mark + suffix_mark):
        suffix, _, rest = text.removeprefix(prefix_mark + suffix_mark).partition(middle_mark)
        return rest + suffix
    prefix, _, rest = text.removeprefix(prefix_mark).partition(suffix_mark)
    suffix, _, middle = rest.partition(middle_mark)
    return prefix + middle + suffix


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.text("ab \u00e4\u4e2d", max_size=12), min_size=1, max_size=4),
    rate=st.sampled_from([0.5, 1.0]),
    spm_rate=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_text_is_lost_and_each_document_stays_in_its_place(
    tokenizer: TokenizersTokenizer, documents: list[str], rate: float, spm_rate: float, seed: int
) -> None:
    move = mover(tokenizer, fim_rate=rate, fim_spm_rate=spm_rate)
    ids = ids_of(tokenizer, *documents)
    room = np.concatenate([ids, np.full(99, tokenizer.eod, np.uint16)])  # so that nothing is cut at the end
    moved = tokenizer.decode(move(room, np.random.RandomState(seed)).tolist()).split(END)
    assert [put_back(text) for text in moved[: len(documents)]] == documents


def test_the_two_orders(tokenizer: TokenizersTokenizer) -> None:
    ids = np.array(tokenizer.encode("abababab") + [tokenizer.eod] * 9)
    for spm_rate, order in ((0.0, [0, 2, 1]), (1.0, [0, 2, 1])):
        moved = mover(tokenizer, fim_rate=1.0, fim_spm_rate=spm_rate)(ids, np.random.RandomState(1)).tolist()
        marks = [tokenizer.token_id(MARKS[number]) for number in order]
        places = [moved.index(mark) for mark in marks]
        assert places == sorted(places), "both begin with the prefix's mark, and end with the middle's"
        assert (places[1] == places[0] + 1) == (spm_rate == 1.0)


def test_middles_begin_within_tokens(tokenizer: TokenizersTokenizer) -> None:
    """Of a document of one token that is four characters, too."""
    ids = np.array([*tokenizer.encode("abab"), *[tokenizer.eod] * 20])
    move = mover(tokenizer, fim_rate=1.0)
    texts = {tokenizer.decode(move(ids, np.random.RandomState(seed)).tolist()).split(END)[0] for seed in range(200)}
    assert {put_back(text) for text in texts} == {"abab"}
    assert len(texts) == 15, "each pair of places of four characters; SPM is PSM with nothing before the middle here"


def test_a_sample_stays_as_long_as_it_is_or_says_where_padding_begins(tokenizer: TokenizersTokenizer) -> None:
    move = mover(tokenizer, fim_rate=1.0)
    longer = ids_of(tokenizer, "a b a b a b")
    assert move(longer, np.random.RandomState(0)).size == longer.size
    # Tokens that text would not be cut to: once it is tokenized anew there are fewer.
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    shorter = np.array([a, b] * 20)
    assert move(shorter, np.random.RandomState(0)).size < shorter.size


def test_the_share_of_documents_is_the_rate(tokenizer: TokenizersTokenizer) -> None:
    ids = ids_of(tokenizer, *["ab ab"] * 2000)
    room = np.concatenate([ids, np.full(9000, tokenizer.eod)])
    prefix, suffix = (tokenizer.token_id(MARKS[number]) for number in (0, 2))
    moved = mover(tokenizer, fim_rate=0.3, fim_spm_rate=0.8)(room, np.random.RandomState(0))
    begins = np.flatnonzero(moved == prefix)
    assert begins.size == pytest.approx(600, abs=60)
    assert (moved[begins + 1] == suffix).mean() == pytest.approx(0.8, abs=0.2)


def test_a_half_of_a_character_stays_where_it_is(tokenizer: TokenizersTokenizer) -> None:
    character = tokenizer.encode("\u4e2d")
    ids = np.array([*character[1:], *tokenizer.encode("ab ab")])
    assert mover(tokenizer, fim_rate=1.0)(ids, np.random.RandomState(0)).tolist() == ids.tolist()


def test_what_begins_as_one_says_stays(tokenizer: TokenizersTokenizer) -> None:
    ids = ids_of(tokenizer, "b keeps", "moves")
    move = mover(tokenizer, fim_rate=1.0, fim_no_prefix="b ")
    room = np.concatenate([ids, np.full(9, tokenizer.eod)])
    kept, moved, *_ = tokenizer.decode(move(room, np.random.RandomState(0)).tolist()).split(END)
    assert kept == "b keeps"
    assert moved != "moves" and put_back(moved) == "moves"


def test_fragments_have_middles_of_their_own(tokenizer: TokenizersTokenizer) -> None:
    move = mover(tokenizer, fim_rate=1.0, fim_split_sample="b", fim_fragment_rate=1.0)
    room = np.concatenate([ids_of(tokenizer, "one b two b three"), np.full(30, tokenizer.eod)])
    fragments = tokenizer.decode(move(room, np.random.RandomState(0)).tolist()).split(END)[0].split("b")
    assert [put_back(fragment) for fragment in fragments] == ["one ", " two ", " three"]
    assert all(fragment.startswith(MARKS[0]) for fragment in fragments)
    none = mover(tokenizer, fim_rate=0.0, fim_split_sample="b", fim_fragment_rate=1.0)
    assert none(room, np.random.RandomState(0)).tolist() == room.tolist()


def test_a_sample_is_a_function_of_the_seed_its_split_and_its_number(tokenizer: TokenizersTokenizer) -> None:
    samples = [ids_of(tokenizer, "a b a b a b a b", "ab ab")] * 5

    def read(seed: int = 1, split: str = "train") -> list[list[int]]:
        dataset = FillInTheMiddleDataset(samples, mover(tokenizer, fim_rate=1.0), seed=seed, split=split)  # type: ignore[arg-type]
        assert len(dataset) == 5
        return [dataset[number].tolist() for number in range(5)]

    assert read() == read()
    assert len({tuple(sample) for sample in read()}) > 1
    assert read() != read(seed=2)
    assert read() != read(split="valid")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"fim_pad_token": "<PAD>"}, r"--fim-pad-token <PAD>: the vocabulary of --tokenizer-type HuggingFaceTokenizer"),
        ({"fim_eod_token": "</s>"}, "--fim-eod-token </s>"),
        ({"fim_split_sample": "class", "fim_fragment_rate": 0.5}, "--fim-split-sample class"),
    ],
)
def test_a_token_that_the_vocabulary_lacks_is_refused(
    tokenizer: TokenizersTokenizer, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        mover(tokenizer, **changed)


@pytest.mark.parametrize("nameless", [ByteTokenizer(), NullTokenizer(9)], ids=lambda tokenizer: tokenizer.name)
def test_a_tokenizer_whose_tokens_have_no_names_is_refused(nameless: Tokenizer) -> None:
    needed = f"--fim-prefix-token <fim_prefix>: the vocabulary of --tokenizer-type {nameless.name}.*--fim-data needs it"
    with pytest.raises(UserError, match=needed):
        middle_mover(DataConfig(seq_length=8, fim_data=True), nameless)


def test_marks_that_ordinary_text_gives_are_named_and_taken(tokenizer: TokenizersTokenizer) -> None:
    """The special tokens of a tokenizer.json are none of them, though their names give them."""
    assert tokenizer.encode(MARKS[0]) == [tokenizer.token_id(MARKS[0])]
    assert ordinary_marks(DataConfig(seq_length=8, fim_data=True, fim_eod_token=END), tokenizer) == []
    data = DataConfig(seq_length=8, fim_data=True, fim_middle_token="ab", fim_pad_token="b", fim_eod_token=END)
    assert ordinary_marks(data, tokenizer) == ["--fim-middle-token ab", "--fim-pad-token b"]
    assert middle_mover(data, tokenizer).middle == tokenizer.token_id("ab")


def six_samples(folder: Path, prefix: Path, *more: str) -> Datasets:
    """The datasets of a training with --fim-data."""
    place = TINY_GPT.index("--tokenizer-type")
    words = [*TINY_GPT[:place], "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    words += [*TINY_GPT[place + 4 :], "--data-path", str(prefix), "--data-cache-path", str(prefix.parent)]
    config, _ = parse_arguments([*words, "--fim-data", *more], world_size=1, say=lambda text: None)
    counts = SampleCounts(train=(6,), valid=0, test=0)
    return gpt_datasets(context_of_rank(config, 0, 1), build_vocabulary(config), counts)


def test_a_training_warns_once_of_marks_that_ordinary_text_gives(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_corpus(tmp_path / "corpus", [[[1, 2] * 75]] * 4)
    six_samples(folder, prefix)
    assert "warning" not in capsys.readouterr().out
    six_samples(folder, prefix, "--fim-middle-token", "ab", "--fim-suffix-token", "b")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert line.startswith("warning: --fim-middle-token ab, --fim-suffix-token b: ordinary text is encoded so too")


def test_padding_is_of_its_own_id_and_counts_for_nothing_by_its_place(
    tokenizer: TokenizersTokenizer, folder: Path, tmp_path: Path
) -> None:
    """The tokens of the corpus are joined when they are tokenized anew, so samples become shorter."""
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    pad = tokenizer.token_id("<fim_pad>")
    prefix = write_corpus(tmp_path / "corpus", [[[a, b] * 75]] * 4)
    datasets = six_samples(folder, prefix, "--fim-rate", "1")
    assert datasets.train is not None
    samples = [datasets.train[number] for number in range(6)]
    batch = datasets.collate(samples, range(6))
    for row, ids in enumerate(samples):
        assert ids.size < 25
        assert batch.tokens[row, : ids.size].tolist() == ids.tolist()  # type: ignore[attr-defined]
        assert batch.tokens[row, ids.size :].tolist() == [pad] * (24 - ids.size)  # type: ignore[attr-defined]
        assert batch.loss_mask[row].tolist() == [True] * (ids.size - 1) + [False] * (25 - ids.size)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"fim_prefix_token": END}, "--fim-prefix-token and --fim-eod-token are one token"),
        ({"fim_pad_token": END}, "--fim-pad-token and --fim-eod-token are one token"),
        ({"fim_eod_token": "<fim_pad>"}, "--fim-pad-token and --fim-eod-token are one token"),
        ({"fim_split_sample": "<fim_pad>", "fim_fragment_rate": 0.5}, "--fim-pad-token and --fim-split-sample"),
        ({"fim_split_sample": END, "fim_fragment_rate": 0.5}, "--fim-split-sample and --fim-eod-token are one token"),
        ({"fim_eod_token": "b", "fim_suffix_token": END}, "--fim-suffix-token and the tokenizer's end of a document"),
    ],
)
def test_a_token_of_two_roles_is_refused(
    tokenizer: TokenizersTokenizer, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        mover(tokenizer, **changed)


def test_padding_may_be_the_tokenizers_own_and_documents_end_with_another_token(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "pad_token": "<fim_pad>"}))
    tokenizer = huggingface_tokenizer(tmp_path)
    made = mover(tokenizer, fim_eod_token="b")
    assert (made.pad, made.eod) == (tokenizer.pad, tokenizer.token_id("b"))


def test_a_tokenizer_that_begins_each_text_with_a_space_is_refused(folder: Path, tmp_path: Path) -> None:
    """Each part would begin with one, within a word too."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox"] * 20),
        model_writer=model,
        vocab_size=40,
        model_type="bpe",
        user_defined_symbols=list(MARKS),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    llama = SentencePieceTokenizer(tmp_path / "t.model", name="Llama2Tokenizer")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=True)
    backend.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (llama, huggingface_tokenizer(tmp_path)):
        with pytest.raises(UserError, match=rf"--tokenizer-type {tokenizer.name} changes them.*the quic k brown fox'"):
            middle_mover(DataConfig(seq_length=8, fim_data=True), tokenizer)
