"""The flags that say which samples there are: lists of datasets in files, validation sets, filling in the middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.config import ConfigError, parse_arguments
from megatron.config.megatron_config import difference
from tests.config.conftest import Parse, Refused, command_line

NO_MOCK = "--mock-data"
FIM = "--fim-data"


def test_a_file_gives_the_words_of_a_data_path(parse: Parse, tmp_path: Path) -> None:
    file = tmp_path / "blend.txt"
    file.write_text("0.3 corpora/a\n0.7\tcorpora/b\n")
    given = parse(f"--data-args-path {file}", without=NO_MOCK)
    assert given == parse("--data-path 0.3 corpora/a 0.7 corpora/b", without=NO_MOCK)


def test_a_file_of_json_gives_the_words_of_each_part(parse: Parse, tmp_path: Path) -> None:
    file = tmp_path / "blends.json"
    file.write_text(json.dumps({"train": [0.3, "a", "0.7", "b"], "valid": "c d", "test": None}))
    given = parse(f"--per-split-data-args-path={file}", without=NO_MOCK)
    assert given == parse("--train-data-path 0.3 a 0.7 b --valid-data-path c d", without=NO_MOCK)


def test_a_printed_configuration_holds_the_words_and_not_the_file(tmp_path: Path) -> None:
    """So that it says what was trained on when the file has changed."""
    (tmp_path / "blend.txt").write_text("a b")
    config_file = tmp_path / "config.yaml"
    config_file.write_text(f"data_args_path: {tmp_path}/blend.txt\n")
    words = [*command_line("", NO_MOCK), "--config", str(config_file)]
    config, _ = parse_arguments(words, check_files=False, say=lambda text: None)
    assert config.data.data_path == ("a", "b")
    printed: list[str] = []
    with pytest.raises(SystemExit):
        parse_arguments([*words, "--print-config"], launched=False, check_files=False, say=printed.append)
    config_file.write_text("\n".join(printed))
    again, _ = parse_arguments(["--config", str(config_file)], check_files=False, say=lambda text: None)
    assert again == config


@pytest.mark.parametrize(
    "content, rule",
    [
        (None, "can not be read: No such file"),
        (b" \n", "holds no word"),
        (b"\xff", "can not be read: 'utf-8' codec"),
    ],
)
def test_a_file_that_gives_no_data_path_is_refused(
    refused: Refused, tmp_path: Path, content: bytes | None, rule: str
) -> None:
    if content is not None:
        (tmp_path / "blend.txt").write_bytes(content)
    text = refused(f"--data-args-path {tmp_path}/blend.txt", without=NO_MOCK)
    assert f"--data-args-path {tmp_path}/blend.txt: {rule}" in text
    assert "Works: --data-args-path FILE of words between blanks or in lines" in text


@pytest.mark.parametrize(
    "content, rule",
    [
        ("0.3 a 0.7 b", "is not JSON"),
        ('["a"]', "must hold the keys train, valid, test, or some of them, and no other"),
        ('{"train": ["a"], "validation": ["b"]}', "must hold the keys train, valid, test"),
        ('{"train": [["a"]]}', "must hold a list of words and numbers under 'train'"),
        ('{"train": [true]}', "must hold a list of words and numbers under 'train'"),
        ('{"train": 3}', "must hold a list of words and numbers under 'train'"),
        ('{"train": []}', "holds no word"),
    ],
)
def test_a_file_that_gives_no_parts_is_refused(refused: Refused, tmp_path: Path, content: str, rule: str) -> None:
    (tmp_path / "blends.json").write_text(content)
    text = refused(f"--per-split-data-args-path {tmp_path}/blends.json", without=NO_MOCK)
    assert f"blends.json: {rule}" in text
    assert '{"train": [...], "valid": [...], "test": [...]}' in text


def test_a_data_path_is_given_once(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "blend.txt").write_text("a b")
    text = refused(f"--data-args-path {tmp_path}/blend.txt --data-path c", without=NO_MOCK)
    assert "--data-path c and --data-args-path give data-path different values" in text
    assert "takes one file, none given" in refused("--data-args-path", without=NO_MOCK)
    assert "takes one file, 2 given" in refused("--data-args-path a b", without=NO_MOCK)


def test_a_wrong_word_in_a_file_is_refused_as_on_the_command_line(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "blend.txt").write_text("0.5 a b")
    assert "some prefixes have weights" in refused(f"--data-args-path {tmp_path}/blend.txt", without=NO_MOCK)


def test_help_shows_the_files_beside_what_they_give(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert "--data-args-path FILE" in text
    assert text.count("--per-split-data-args-path FILE") == 1


def test_validation_sets_are_called_by_their_names_or_by_the_last_of_their_prefixes(parse: Parse) -> None:
    line = "--train-data-path t --valid-data-path x/a y/b --multiple-validation-sets"
    assert parse(line, without=NO_MOCK).data.validation_sets == ("a", "b")
    named = parse(f"{line} --validation-set-names web code", without=NO_MOCK)
    assert named.data.validation_sets == ("web", "code")


@pytest.mark.parametrize(
    "line, rule",
    [
        ("--data-path a --multiple-validation-sets", "--valid-data-path, which is not given"),
        ("--train-data-path t --valid-data-path 1 a 2 b --multiple-validation-sets", "Works: --valid-data-path a b"),
        (
            "--train-data-path t --valid-data-path a b --multiple-validation-sets --validation-set-names c",
            "is 1 names for the 2 sets",
        ),
        ("--train-data-path t --valid-data-path x/a y/a --multiple-validation-sets", "two are called the same"),
        ("--train-data-path t --valid-data-path a b --validation-set-names c d", "which is not given"),
        ("--data-path 1 a 2 b --full-validation", "--data-path has weights"),
        ("--train-data-path t --valid-data-path 1 a 2 b --full-validation", "--valid-data-path has weights"),
        ("--data-path a --full-validation --eval-iters 0", "nothing is evaluated"),
    ],
)
def test_validation_sets_that_can_not_be_are_refused(refused: Refused, line: str, rule: str) -> None:
    assert rule in refused(line, without=NO_MOCK)


@pytest.mark.parametrize("line", ["--fim-rate 0.9", "--fim-prefix-token <PRE>", "--fim-eod-token </s>"])
def test_what_belongs_to_filling_in_the_middle_is_not_ignored_without_it(refused: Refused, line: str) -> None:
    assert f"{line}: is about filling in the middle, and --fim-data is not given" in refused(line)


def test_the_defaults_of_filling_in_the_middle_ask_for_nothing(parse: Parse) -> None:
    """Launch scripts may spell them out."""
    assert parse("--fim-rate 0.5 --fim-spm-rate 0.5") == parse()


@pytest.mark.parametrize(
    "line, rule",
    [
        ("--fim-rate 1.5", "must be at least 0 and at most 1"),
        ("--fim-split-sample x", "only together with --fim-fragment-rate"),
        ("--fim-fragment-rate 0.5", "only together with --fim-split-sample"),
        ("--fim-middle-token <fim_suffix>", "must differ"),
    ],
)
def test_filling_in_the_middle_that_can_not_be_is_refused(refused: Refused, line: str, rule: str) -> None:
    assert rule in refused(f"{FIM} {line}")


@pytest.mark.parametrize("line", [FIM, "--full-validation"])
def test_samples_that_only_gpt_has_are_refused_for_bert(line: str) -> None:
    with pytest.raises(ConfigError, match=r"belongs to pretrain_gpt\.py"):
        parse_arguments(command_line(line), task="bert", check_files=False, say=lambda text: None)


def test_a_difference_of_blends_is_seen_though_the_file_is_the_same(parse: Parse, tmp_path: Path) -> None:
    file = tmp_path / "blend.txt"
    file.write_text("0.3 a 0.7 b")
    saved = parse(f"--data-args-path {file}", without=NO_MOCK)
    file.write_text("0.4 a 0.6 b")
    (changed,) = difference(saved, parse(f"--data-args-path {file}", without=NO_MOCK))
    assert (changed.flag, changed.affects) == ("--data-path", "data")
