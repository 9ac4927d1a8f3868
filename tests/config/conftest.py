"""A command line that is right, to be changed one flag at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron.config import ConfigError, MegatronConfig, parse_arguments

RIGHT: dict[str, str] = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "2",
    "--global-batch-size": "16",
    "--train-iters": "100",
    "--lr": "1e-3",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "100",
    "--mock-data": "",
}

Parse = Callable[..., MegatronConfig]
Refused = Callable[..., str]


def command_line(line: str = "", without: str = "") -> list[str]:
    """The right command line without some flags, followed by `line`."""
    words = []
    for name, value in RIGHT.items():
        if name not in without.split():
            words += [name, value] if value else [name]
    return words + line.split()


@pytest.fixture
def parse() -> Parse:
    def run(
        line: str = "", *, without: str = "", world_size: int | None = None, check_files: bool = False
    ) -> MegatronConfig:
        config, _ = parse_arguments(
            command_line(line, without), world_size=world_size, check_files=check_files, say=lambda text: None
        )
        return config

    return run


@pytest.fixture
def refused(parse: Parse) -> Refused:
    """The text of the refusal, and the number of problems in it must be as expected."""

    def run(line: str = "", *, problems: int = 1, **settings: object) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(line, **settings)
        assert len(caught.value.problems) == problems, str(caught.value)
        return str(caught.value)

    return run
