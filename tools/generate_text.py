"""Continue prompts with a trained model, whatever layout its checkpoint was written in.

python tools/generate_text.py --load checkpoints --prompt 'def main():' --num-tokens 200 --temperature 0.8

One --prompt is printed as text, while it is written. Several, or those of --prompt-file, are written in batches and
printed as JSON lines, {"prompt": ..., "text": ...}, in their order. A file holds one prompt a line, or, when its name
ends in .jsonl, one {"text": ...} a line.

A model that one process has no room for runs over several:

torchrun --nproc-per-node 4 tools/generate_text.py --load checkpoints --prompt-file prompts.txt \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

The tokenizer is the one of the training, read from where it was then. Where its files lie elsewhere now:

python tools/generate_text.py --load checkpoints --tokenizer-model tokenizer.model
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from command_line import Parser, at_least, elapsed, progress, run_tool, say
from model_tools import UsedModel, add_model_flags, content_of, decoded, model_in_use, texts_of
from torch import nn

from megatron.config.problems import UserError, counted
from megatron.inference.generation import Sampling, generate
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.initialize import exiting_at_the_start

# A thread goes through so many in 50 ms; what is done sooner has nothing to share.
WEIGHTS_OF_A_THREAD = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text to continue.

    Attributes:
        number: its place among all of them; it decides which numbers its tokens are drawn with.
        tokens: at least one: that which ends a document stands before an empty one.
    """

    number: int
    text: str
    tokens: list[int]

    def continuation(self, tokenizer: Tokenizer, new: Sequence[int]) -> str:
        """The text of further tokens; what a token looks like may depend on those before it."""
        return tokenizer.decode([*self.tokens, *new])[len(tokenizer.decode(self.tokens)) :]


def main() -> None:
    parser = Parser(__doc__)
    add_model_flags(parser)
    parser.add_argument("--prompt", action="append", help="text to continue (default: the start of a document)")
    parser.add_argument("--prompt-file", type=Path, help="file with one prompt a line, JSON where it ends in .jsonl")
    parser.add_argument(
        "--batch-size", type=at_least(1), default=16, help="prompts that are written together (default 16)"
    )
    parser.add_argument("--num-tokens", type=at_least(1), default=200, help="tokens to generate at most (default 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k most likely tokens only (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most likely tokens of this probability")
    parser.add_argument("--seed", type=int, default=1234, help="the same seed gives the same texts (default 1234)")
    options = parser.read()
    if not 0 <= options.seed < 2**64:  # what torch's generator takes
        raise UserError(f"--seed ({options.seed}) must be at least 0 and less than 2^64")
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    texts = given_texts(options)
    with model_in_use(options) as used:
        prompts = prompts_of(texts, used)
        longest = max(len(prompt.tokens) for prompt in prompts)
        if longest + options.num_tokens > used.opened.context_length:
            used.note(
                f"the model looks back on {used.opened.context_length} tokens: each further one of a text reads the "
                "last of them again, which is slower"
            )
        if used.staged.device.type == "cpu":
            torch.set_num_threads(min(torch.get_num_threads(), threads_for(used.staged.part)))
        started = time.perf_counter()
        if options.prompt_file is None and len(prompts) == 1:
            count = stream(used, prompts[0], options, sampling)
        else:
            count = write_all(used, prompts, options, sampling)
        rate = count / (time.perf_counter() - started)
        used.note(f"{counted(count, 'token')} in {elapsed(started)}: {rate:,.1f} tokens/s")


def threads_for(model: nn.Module) -> int:
    """How many threads a token is worth: it passes each weight once, and threads need time to meet."""
    return max(1, sum(parameter.numel() for parameter in model.parameters()) // WEIGHTS_OF_A_THREAD)


def given_texts(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The prompts, each with the place that it stands in, for messages."""
    texts = [(text, f"--prompt {text[:40]!r}") for text in options.prompt or []]
    path = options.prompt_file
    if path is None:
        return texts or [("", "--prompt")]
    if path.suffix == ".jsonl":
        return texts + texts_of(path, flag="--prompt-file")
    lines = enumerate(content_of(path, flag="--prompt-file").splitlines(), start=1)
    found = [
        (decoded(line, path, flag="--prompt-file"), f"{path}, line {number}") for number, line in lines if line.strip()
    ]
    if not found:
        raise UserError(f"--prompt-file {path}: holds no prompt; it has one a line")
    return texts + found


def prompts_of(texts: Sequence[tuple[str, str]], used: UsedModel) -> list[Prompt]:
    tokenizer, most = used.opened.tokenizer, used.opened.context_length
    prompts = []
    for number, (text, where) in enumerate(texts):
        tokens = tokenizer.encode(text) or [tokenizer.eod]
        if len(tokens) > most:
            raise UserError(
                f"{where}: has {len(tokens):,} tokens, and the model looks back on {most:,} (--seq-length of the "
                f"training); give the last {most:,} or fewer"
            )
        prompts.append(Prompt(number=number, text=text, tokens=tokens))
    return prompts


def stream(used: UsedModel, prompt: Prompt, options: argparse.Namespace, sampling: Sampling) -> int:
    """Print a text while it is written; the number of its tokens."""
    tokenizer = used.opened.tokenizer

    def show(text: str) -> None:
        if used.speaks:
            print(text, end="", flush=True)

    show(prompt.text)
    tokens: list[int] = []
    shown = ""
    for (token,) in steps(used, [prompt], options, sampling):
        assert token is not None
        tokens.append(token)
        text = prompt.continuation(tokenizer, tokens)
        if not text.endswith("�"):  # a character may span tokens: what is new and complete is printed
            show(text[len(shown) :])
            shown = text
    show(prompt.continuation(tokenizer, tokens)[len(shown) :] + "\n")
    return len(tokens)


def write_all(used: UsedModel, prompts: Sequence[Prompt], options: argparse.Namespace, sampling: Sampling) -> int:
    """Print what follows each prompt, batch by batch; the number of tokens."""
    count = 0
    with progress(len(prompts), "writing", unit="prompt") if used.speaks else nullcontext() as bar:
        for first in range(0, len(prompts), options.batch_size):
            batch = prompts[first : first + options.batch_size]
            found: list[list[int]] = [[] for _ in batch]
            for step in steps(used, batch, options, sampling):
                for tokens, token in zip(found, step, strict=True):
                    tokens += [] if token is None else [token]
            count += sum(map(len, found))
            if bar is not None:
                for prompt, tokens in zip(batch, found, strict=True):
                    text = prompt.continuation(used.opened.tokenizer, tokens)
                    say(json.dumps({"prompt": prompt.text, "text": text}, ensure_ascii=False))
                bar.update(len(batch))
    return count


def steps(
    used: UsedModel, prompts: Sequence[Prompt], options: argparse.Namespace, sampling: Sampling
) -> Iterator[list[int | None]]:
    return generate(
        used.staged,
        [prompt.tokens for prompt in prompts],
        num_tokens=options.num_tokens,
        context_length=used.opened.context_length,
        end_token=used.opened.tokenizer.eod,
        sampling=sampling,
        generators=[torch.Generator().manual_seed((options.seed + prompt.number) % 2**64) for prompt in prompts],
    )


if __name__ == "__main__":
    run_tool(main, exiting_at_the_start)
