"""Sample text from a checkpoint, in one process, whatever layout wrote it.

python tools/generate_text.py --load checkpoints --prompt 'def main():' --num-tokens 200 --temperature 0.8

The tokenizer is the one of the training, read from where it was then. Where its files lie elsewhere now:

python tools/generate_text.py --load checkpoints --tokenizer-model tokenizer.model
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from command_line import Parser, elapsed, run_tool, say

from megatron.checkpointing import load_checkpoint, model_tensors
from megatron.config.arguments import add_to_parser
from megatron.config.megatron_config import MegatronConfig, section_problems
from megatron.config.options import flag_name, section_options
from megatron.config.pipeline_layout import StageLayout
from megatron.config.problems import ConfigError, UserError, counted
from megatron.config.tokenizer import TOKENIZER_FILES, TokenizerConfig
from megatron.core.comm_group import CommGroup
from megatron.core.parallel_state import ParallelState
from megatron.inference.generation import Sampling, generate
from megatron.model.gpt_model import GPTModel
from megatron.tokenizer.tokenizer import Tokenizer
from megatron.training.gpt import gpt_model
from megatron.training.initialize import MegatronContext
from megatron.training.setup import build_vocabulary


def load_model(
    folder: str, step: int | None, files: Mapping[str, Any], device: torch.device
) -> tuple[GPTModel, Tokenizer, MegatronConfig]:
    """The whole model of a checkpoint in this process, with the tokenizer that it was trained with.

    Args:
        files: paths of the tokenizer's files that take the place of those of the training, by field.

    Raises:
        UserError: the tokenizer has another number of tokens than the model.
    """
    world = CommGroup.single("world")
    checkpoint = load_checkpoint(folder, step=step, world=world)
    config = MegatronConfig.from_dict(checkpoint.metadata["config"])
    # The weights of a checkpoint have all their bits, also where the training computed with fewer.
    full = replace(config.optimizer, precision="fp64" if config.optimizer.precision == "fp64" else "fp32")
    config = replace(config, tokenizer=tokenizer_of(config.tokenizer, files), optimizer=full)
    vocabulary = build_vocabulary(config)
    embedding = checkpoint.tensors.get("model.embedding.word_embeddings.weight")  # another model than a GPT has none
    if embedding is not None and vocabulary.size != embedding.shape[0]:
        paths = {field: getattr(config.tokenizer, field) for field in TOKENIZER_FILES}
        shown = " ".join(f"{flag_name(field)} {path}" for field, path in paths.items() if path is not None)
        raise UserError(
            f"{shown or config.tokenizer.tokenizer_type}: the tokenizer has {counted(vocabulary.size, 'token')}, and "
            f"the model was trained with {embedding.shape[0]:,}; give the tokenizer of the training"
        )
    context = MegatronContext(config=config, state=ParallelState.single(), device=device, extra=argparse.Namespace())
    stage = StageLayout(stage=0, chunk=0, layers=range(config.model.num_layers), has_embedding=True, has_output=True)
    model = gpt_model(context, stage, vocabulary)
    checkpoint.load_into(model_tensors([model]), world=world, ignore=("optimizer.",))
    return model.eval(), vocabulary.tokenizer, config


def tokenizer_of(trained: TokenizerConfig, files: Mapping[str, Any]) -> TokenizerConfig:
    """The tokenizer of the training with its files at other paths.

    Raises:
        ConfigError: a file is not there, or the tokenizer has no such file.
    """
    config = replace(trained, **files)
    if config.tokenizer_type != "NullTokenizer":  # what size its files must have is for the model to say
        config = replace(config, vocab_size=None)
    problems = section_problems(config)
    given = {option.name for option in section_options("tokenizer", TokenizerConfig) if option.field in files}
    for problem in config.file_problems():
        (flag,) = problem.flags
        if flag not in given:
            works = f"{flag} with the path that it has here"
            problem = replace(problem, rule=f"{problem.rule}; this is its path in the training", works=works)
        problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return config


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--load", required=True, help="checkpoint folder: the --save of the training")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the newest)")
    parser.add_argument("--prompt", default="", help="text to continue (default: the start of a document)")
    parser.add_argument("--num-tokens", type=int, default=200, help="tokens to generate at most (default 200)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default 1.0)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k most likely tokens only (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the most likely tokens of this probability")
    parser.add_argument("--seed", type=int, default=1234, help="the same seed gives the same text (default 1234)")
    group = parser.add_argument_group("files of the tokenizer", "by default where they were in the training")
    tokenizer_options = section_options("tokenizer", TokenizerConfig)
    add_to_parser(group, (option for option in tokenizer_options if option.field in TOKENIZER_FILES))
    options = parser.read()
    files = {field: path for field in TOKENIZER_FILES if (path := getattr(options, field)) is not None}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.num_tokens < 1:
        raise UserError(f"--num-tokens ({options.num_tokens}) must be at least 1")
    if not 0 <= options.seed < 2**64:  # what torch's generator takes
        raise UserError(f"--seed ({options.seed}) must be at least 0 and less than 2^64")
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    print(f"reading {options.load}", file=sys.stderr)
    model, tokenizer, config = load_model(options.load, options.ckpt_step, files, device)
    prompt = tokenizer.encode(options.prompt) or [tokenizer.eod]
    started = time.perf_counter()
    tokens: list[int] = []
    shown = ""
    print(options.prompt, end="")
    for token in generate(
        model,
        prompt,
        num_tokens=options.num_tokens,
        context_length=config.data.seq_length,
        end_token=tokenizer.eod,
        sampling=sampling,
        generator=torch.Generator().manual_seed(options.seed),
    ):
        tokens.append(token)
        # A character may span tokens: decode all of them and print what is new and complete.
        text = tokenizer.decode(tokens)
        if not text.endswith("�"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    say(tokenizer.decode(tokens)[len(shown) :])
    print(f"{counted(len(tokens), 'token')} in {elapsed(started)}", file=sys.stderr)


if __name__ == "__main__":
    run_tool(main)
