"""Fill the [MASK]s of a text with a trained BERT.

python tools/fill_mask.py --load checkpoints --text 'for name in [MASK] . items ( ) :'

Each mask is filled with its likeliest token, and the likeliest ones are listed with their probabilities. --text may be
given several times; a text of two segments has [SEP] between them, and is told whether they stand in their order.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from command_line import Parser, at_least, run_tool
from torch import Tensor

from megatron.config.options import flag_name
from megatron.config.problems import UserError
from megatron.config.tokenizer import TOKENIZER_FILES
from megatron.inference.load import OpenedModel, open_model
from megatron.model.bert_model import BertModel, BertOutput
from megatron.tokenizer.tokenizer import Tokenizer

MASK, SEP = "[MASK]", "[SEP]"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--load", type=Path, required=True, help="checkpoint folder: the --save of the training")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load (default: the newest)")
    parser.add_argument("--text", action="append", required=True, help=f"text with {MASK}; {SEP} parts two segments")
    parser.add_argument("--top-k", type=at_least(1), default=4, help="tokens to list for each mask (default 4)")
    for field in TOKENIZER_FILES:
        parser.add_argument(flag_name(field), help="a file of the tokenizer (default: the copy in the checkpoint)")
    options = parser.read()
    files = {field: path for field in TOKENIZER_FILES if (path := getattr(options, field)) is not None}
    opened = open_model(options.load, step=options.ckpt_step, tokenizer_files=files)
    if opened.config.bert is not None:  # a GPT is refused for what it is
        check_roles(opened.tokenizer, options.load)
    model = opened.load_bert()
    for text in options.text:
        try:
            print(filled(model, opened, text, top_k=options.top_k))
        except UserError as error:
            raise UserError(f"--text {text!r}: {error}") from None


def check_roles(tokenizer: Tokenizer, folder: Path) -> None:
    """That a text with masks can be put to the model, which is known before its weights are read."""
    for role, token in (("[CLS]", tokenizer.cls), (SEP, tokenizer.sep), (MASK, tokenizer.mask)):
        if token is None:
            raise UserError(
                f"--load {folder}: its tokenizer, {tokenizer.name}, has no {role}; a model that is converted with its "
                "vocab.txt beside it has"
            )


@torch.inference_mode()
def filled(model: BertModel, opened: OpenedModel, text: str, *, top_k: int) -> str:
    """The text with its masks filled, and a line on each of them.

    Raises:
        UserError: the text has no mask, more than two segments, or is longer than the model's sequences.
    """
    tokenizer = opened.tokenizer
    tokens, types = tokens_of(text, tokenizer)  # [1, s] each
    if tokens.shape[1] > opened.context_length:
        raise UserError(f"has {tokens.shape[1]} tokens; the model was trained on up to {opened.context_length}")
    output = model(tokens, types, torch.ones_like(tokens, dtype=torch.bool))
    assert isinstance(output, BertOutput)
    masks = tokens[0] == tokenizer.mask  # [s]
    likely = output.tokens[0, masks].double().softmax(-1).topk(min(top_k, tokenizer.vocab_size))  # [masks, k]
    best = iter([tokenizer.decode([token]).strip() or "�" for token in likely.indices[:, 0].tolist()])
    lines = [re.sub(re.escape(MASK), lambda _: next(best), text)]
    for number, (chances, ids) in enumerate(zip(likely.values.tolist(), likely.indices.tolist()), start=1):
        named = (f"{tokenizer.decode([token])} {chance:.0%}" for token, chance in zip(ids, chances))
        lines.append(f"  {MASK} {number}: {', '.join(named)}")
    if output.pairs is not None and types.any():
        in_order, exchanged = output.pairs[0].double().softmax(-1).tolist()
        lines.append(f"  segments in their order {in_order:.0%}, exchanged {exchanged:.0%}")
    return "\n".join(lines)


def tokens_of(text: str, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """[CLS] segment [SEP], or two of them, and the types of their tokens: [1, s] each."""
    assert tokenizer.cls is not None and tokenizer.sep is not None and tokenizer.mask is not None
    segments = text.split(SEP)
    if MASK not in text or len(segments) > 2:
        capitals = ", in capitals," if MASK not in text and MASK in text.upper() else ""
        raise UserError(f"needs a {MASK}{capitals} to fill, and at most one {SEP}, between two segments")
    around = {tokenizer.cls, tokenizer.sep}  # which a tokenizer may put round each piece, too
    tokens, types = [tokenizer.cls], [0]
    for number, segment in enumerate(segments):
        pieces = [[token for token in tokenizer.encode(piece) if token not in around] for piece in segment.split(MASK)]
        ids = [*pieces[0], *(token for piece in pieces[1:] for token in (tokenizer.mask, *piece)), tokenizer.sep]
        tokens += ids
        types += [number] * len(ids)
    return torch.tensor([tokens]), torch.tensor([types])


if __name__ == "__main__":
    run_tool(main)
