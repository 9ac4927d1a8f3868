"""Text from a checkpoint: of one prompt or many, on one rank or several, also when its tokenizer has moved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.training.saving import save_run
from tests.data.corpora import write_corpus
from tests.helpers.launch import launch
from tests.helpers.tokenizer_files import BOTCHAN_MODEL, mistral_model
from tests.helpers.tools import ROOT, command, names_of_tool, on_ranks, run, run_as_program
from tests.training.runs import trained

VOCABULARY = "1000"


def train_in(folder: Path, *arguments: str) -> Path:
    """`folder`, which then holds `checkpoints`, and `tokenizer.model` where the training read it."""
    shutil.copy(BOTCHAN_MODEL, folder / "tokenizer.model")
    trained(
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "tokenizer.model")),
        *("--vocab-size", VOCABULARY, "--train-iters", "1", "--save", str(folder / "checkpoints"), *arguments),
    )
    return folder


@pytest.fixture
def trained_folder(tmp_path: Path) -> Path:
    return train_in(tmp_path)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for tests that leave it as it is; of a model in float64, whose texts no rounding can change."""
    return train_in(tmp_path_factory.mktemp("shared"), "--fp64")


def sample(folder: Path, *arguments: str, status: int = 0) -> str:
    """What the tool prints for one prompt and seed; what it complains of, where the status is 2."""
    words = ["--load", folder / "checkpoints", "--prompt", "a cat", "--num-tokens", "8", *arguments]
    return run("generate_text", *words, status=status)


def test_a_checkpoint_is_sampled_where_its_tokenizer_has_moved(trained_folder: Path) -> None:
    before = sample(trained_folder)
    assert before.startswith("a cat")
    assert len(before) > len("a cat\n")
    moved = (trained_folder / "tokenizer.model").rename(trained_folder / "moved.model")
    assert sample(trained_folder) == before, "with the copy that the checkpoint keeps"
    shutil.rmtree(trained_folder / "checkpoints" / "tokenizer")
    assert sample(trained_folder, "--tokenizer-model", str(moved)) == before


def test_a_tokenizer_that_is_gone_is_missed_by_the_flag_that_gives_its_place(trained_folder: Path) -> None:
    (trained_folder / "tokenizer.model").unlink()
    shutil.rmtree(trained_folder / "checkpoints" / "tokenizer")
    said = sample(trained_folder, status=2)
    assert f"--tokenizer-model {trained_folder}/tokenizer.model: no such file; this is its path in the training" in said
    assert "Works: --tokenizer-model with the path that it has here" in said


def test_a_given_file_that_is_not_there_is_not_taken_for_that_of_the_training(trained_folder: Path) -> None:
    said = sample(trained_folder, "--tokenizer-model", str(trained_folder / "absent.model"), status=2)
    assert f"--tokenizer-model {trained_folder}/absent.model: no such file" in said
    assert "in the training" not in said


def test_a_file_that_the_tokenizer_has_not_is_refused(trained_folder: Path) -> None:
    said = sample(trained_folder, "--vocab-file", str(BOTCHAN_MODEL), status=2)
    assert "SentencePieceTokenizer does not use it" in said


def test_a_tokenizer_of_another_size_is_named_with_both_sizes(trained_folder: Path) -> None:
    other = mistral_model()
    said = sample(trained_folder, "--tokenizer-model", str(other), status=2)
    assert f"--tokenizer-model {other}: the tokenizer has 32,000 tokens, and the model was trained with 1,000" in said
    assert len(said.splitlines()) == 1, said


PROMPTS = ["a cat", "the king said", "I", "and so on and so on"]


def texts(folder: Path, *arguments: str | Path) -> list[str]:
    """What follows each prompt, of lines of JSON."""
    printed = run("generate_text", "--load", folder / "checkpoints", "--num-tokens", "6", *arguments)
    return [json.loads(line)["text"] for line in printed.splitlines()]


def each_prompt(prompts: list[str]) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


def test_several_prompts_are_continued_as_each_of_them_alone(shared_folder: Path) -> None:
    together = texts(shared_folder, *each_prompt(PROMPTS), "--seed", "5")
    alone = [
        run(
            *("generate_text", "--load", shared_folder / "checkpoints", "--num-tokens", "6"),
            *("--prompt", prompt, "--seed", str(5 + number)),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    assert [f"{prompt}{text}\n" for prompt, text in zip(PROMPTS, together, strict=True)] == alone
    assert texts(shared_folder, *each_prompt(PROMPTS), "--seed", "5", "--batch-size", "3") == together


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_prompts_come_from_a_file_of_text_or_of_json(shared_folder: Path, tmp_path: Path, name: str) -> None:
    as_json = name.endswith(".jsonl")
    lines = [json.dumps({"text": prompt}) if as_json else prompt for prompt in PROMPTS]
    (tmp_path / name).write_text("\n\n".join(lines))
    expected = texts(shared_folder, *each_prompt(PROMPTS))
    assert texts(shared_folder, "--prompt-file", tmp_path / name) == expected
    assert texts(shared_folder, "--prompt", PROMPTS[0], "--prompt-file", tmp_path / name)[0] == expected[0]


@pytest.mark.parametrize("tensor, pipeline", [(2, 1), (1, 2), (2, 2)])
def test_ranks_write_what_one_process_writes(shared_folder: Path, tmp_path: Path, tensor: int, pipeline: int) -> None:
    words = ["--load", str(shared_folder / "checkpoints"), *each_prompt(PROMPTS), "--num-tokens", "6"]
    layout = ["--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline)]
    outcome = on_ranks("generate_text", *words, *layout, ranks=tensor * pipeline, folder=tmp_path).check()
    assert outcome.out == [run("generate_text", *words)] + [""] * (tensor * pipeline - 1)


def test_a_text_goes_on_beyond_what_the_model_looks_back_on(shared_folder: Path) -> None:
    greedy = ["--temperature", "0"]
    long, short = (sample(shared_folder, "--num-tokens", number, *greedy) for number in ("60", "20"))
    assert long.startswith(short.rstrip("\n"))
    assert len(long) > 2 * len(short)


def test_a_space_between_prompt_and_text_is_kept() -> None:
    tokenizer = SentencePieceTokenizer(BOTCHAN_MODEL)
    prompt = names_of_tool("generate_text")["Prompt"](number=0, text="a cat", tokens=tokenizer.encode("a cat"))
    assert prompt.continuation(tokenizer, tokenizer.encode("said so")) == " said so"


@pytest.mark.parametrize(("weights", "threads"), [(10_000, 1), (99_000_000, 1), (7_000_000_000, 70)])
def test_a_thread_is_for_many_weights(weights: int, threads: int) -> None:
    model = torch.nn.Linear(1, weights, bias=False, device="meta")
    assert names_of_tool("generate_text")["threads_for"](model) == threads


@pytest.mark.parametrize(("load", "threads"), [(0.0, 4), (4.2, 4), (5.0, 3), (30.0, 1)])
def test_threads_leave_cores_to_other_programs(load: float, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = names_of_tool("model_tools")
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    assert tools["free_threads"]() == threads


def test_the_tool_streams_one_prompt_as_its_users_start_it(shared_folder: Path) -> None:
    words = ["--load", shared_folder / "checkpoints", "--prompt", "a cat", "--num-tokens", "30"]
    done = subprocess.run(command("generate_text", *words), cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("a cat")
    reading, note, speed = done.stderr.splitlines()
    assert reading == f"reading {shared_folder}/checkpoints/iter_0000001"
    assert note.startswith("the model looks back on 24 tokens: ")
    assert speed.startswith("30 tokens in ") and speed.endswith(" tokens/s")


def refused(folder: Path, *arguments: str | Path) -> str:
    """The complaint, which is one line after those of what is read."""
    said = run("generate_text", "--load", folder / "checkpoints", *arguments, status=2)
    return said.splitlines()[-1].removeprefix("generate_text.py: error: ")


def test_a_prompt_longer_than_the_context_is_refused_by_its_place(shared_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a cat\n" + "the king " * 30)
    assert refused(shared_folder, "--prompt-file", file).startswith(f"{file}, line 2: has ")
    assert "the model looks back on 24 (--seq-length" in refused(shared_folder, "--prompt", "the king " * 30)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("absent.txt", None, "no such file"),
        ("empty.txt", "", "holds no prompt; it has one a line"),
        ("blank.txt", "\n  \n", "holds no prompt; it has one a line"),
        ("empty.jsonl", "", 'holds no text; a line is such as {"text": "..."}'),
        ("broken.jsonl", '{"text": "a"}\n{"text": ', "line 2: not valid JSON"),
        ("other.jsonl", '{"prompt": "a"}', "line 1: the record has no key 'text'; its keys: 'prompt'"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    said = refused(tmp_path, "--prompt-file", tmp_path / name)
    assert name in said and complaint in said


def test_a_prompt_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert refused(tmp_path, "--prompt-file", tmp_path / "latin.txt").endswith("convert the file to UTF-8")


def test_a_layout_that_the_model_does_not_fit_is_refused(shared_folder: Path) -> None:
    said = run("generate_text", "--load", shared_folder / "checkpoints", "--tensor-model-parallel-size", "5", status=2)
    assert "must be divisible by --tensor-model-parallel-size 5: each rank holds whole heads" in said


def test_other_ranks_than_the_layout_takes_are_refused(shared_folder: Path, tmp_path: Path) -> None:
    said = refused(shared_folder, "--tensor-model-parallel-size", "2")
    assert said == (
        "--tensor-model-parallel-size 2 with --pipeline-model-parallel-size 1 is for 2 rank(s), and 1 started: "
        "torchrun --nproc-per-node 2 generate_text.py …"
    )
    outcome = on_ranks("generate_text", "--load", shared_folder / "checkpoints", ranks=2, folder=tmp_path)
    assert outcome.codes == [2, 2]
    assert "is for 1 rank(s), and 2 started" in outcome.err[0] and outcome.err[1] == ""


def test_what_all_ranks_refuse_is_said_once(shared_folder: Path, tmp_path: Path) -> None:
    words = ["--load", str(shared_folder / "checkpoints"), "--prompt", "the king " * 30]
    outcome = on_ranks("generate_text", *words, "--tensor-model-parallel-size", "2", ranks=2, folder=tmp_path)
    assert outcome.codes == [2, 2]
    assert "".join(outcome.err).count("error: ") == 1


def test_an_interrupt_of_ranks_is_said_once_and_of_no_checkpoint(shared_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("the king\n" * 10_000)
    words = ["--load", str(shared_folder / "checkpoints"), "--prompt-file", str(tmp_path / "prompts.txt")]
    words += ["--batch-size", "1", "--tensor-model-parallel-size", "2"]
    ranks = launch(partial(run_as_program, "generate_text"), words, ranks=2, folder=tmp_path)
    while not any(file.stat().st_size for file in tmp_path.glob("rank-*.out")):
        assert all(process.is_alive() for process in ranks.processes)
        time.sleep(0.05)
    for process in ranks.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    outcome = ranks.wait(30)
    assert outcome.codes == [130, 130]
    said = "".join(outcome.err)
    assert said.count("interrupted\n") == 1
    assert "Traceback" not in said


def test_weights_that_are_not_finite_are_said(tmp_path: Path) -> None:
    training, _ = trained("--train-iters", "1")
    for named in training.optimizer.named_main_parameters():
        named.tensor[0] = float("nan")
    save_run(training, tmp_path / "checkpoints")
    corpus = write_corpus(tmp_path / "corpus", [[[1, 2, 3]]])
    for tool, words in (("generate_text", ["--prompt", "1"]), ("evaluate", ["--data-path", str(corpus)])):
        said = run(tool, "--load", tmp_path / "checkpoints", *words, status=2)
        assert "are not finite, as when weights hold NaN; --ckpt-step takes an earlier" in said


def test_the_smallest_temperature_takes_the_most_likely_token(trained_folder: Path) -> None:
    assert sample(trained_folder, "--temperature", "1e-320") == sample(trained_folder, "--temperature", "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-tokens", "0"], "--num-tokens: must be at least 1, not 0"),
        (["--batch-size", "0"], "--batch-size: must be at least 1, not 0"),
        (["--num-tokens", "-3"], "--num-tokens: must be at least 1, not -3"),
        (["--temperature", "-1"], "--temperature (-1.0) must be 0 or more"),
        (["--temperature", "nan"], "--temperature (nan) must be 0 or more"),
        (["--seed", "99999999999999999999"], "--seed (99999999999999999999) must be at least 0 and less than 2^64"),
        (["--seed", "-1"], "--seed (-1) must be at least 0"),
        (["--tokens", "3"], "--tokens: is not a known flag; --num-tokens is the nearest"),
    ],
)
def test_a_sample_that_cannot_be_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in sample(tmp_path, *arguments, status=2)
