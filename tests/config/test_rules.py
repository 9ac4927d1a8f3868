"""Each rule refuses what breaks it, names flag, value and rule, and says what works; and that does work."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.config import ConfigError, TransformerConfig, parse_arguments
from megatron.config.data import Blend, parse_blend
from megatron.config.megatron_config import all_options, difference
from megatron.config.tokenizer import TokenizerConfig
from tests.config.conftest import Parse, Refused, command_line

# line, flags left out of the right command line, processes, words of the refusal
REFUSED = [
    # the model
    (
        "--hidden-size 60 --num-attention-heads 8",
        "",
        None,
        ["--hidden-size 60", "--num-attention-heads 8", "56 or 64"],
    ),
    ("--num-attention-heads 0", "", None, ["--num-attention-heads 0", "at least 1"]),
    ("--num-query-groups 4", "", None, ["--num-query-groups 4", "--group-query-attention"]),
    (
        "--group-query-attention --num-query-groups 3",
        "",
        None,
        ["--num-query-groups 3", "divide", "1, 2 or 4"],
    ),
    ("--hidden-dropout 1", "", None, ["--hidden-dropout 1.0", "less than 1", "--hidden-dropout 0.1"]),
    ("--attention-dropout -0.1", "", None, ["--attention-dropout -0.1", "at least 0", "--attention-dropout 0"]),
    (
        "--swiglu --hidden-size 16",
        "",
        None,
        ["--ffn-hidden-size", "--hidden-size 16", "that is 0", "--ffn-hidden-size 64"],
    ),
    ("--cross-entropy-fusion-impl linear", "", None, ["--cross-entropy-fusion-impl linear", "which is off"]),
    ("--fast-attention-dropout --attention-dropout 0", "", None, ["--fast-attention-dropout", "is 0"]),
    (
        "--fast-attention-dropout --apply-query-key-layer-scaling",
        "",
        None,
        ["--fast-attention-dropout", "--apply-query-key-layer-scaling takes the explicit path"],
    ),
    (
        "--fp32-residual-connection",
        "",
        None,
        ["--fp32-residual-connection", "the precision is fp32", "--bf16 or --fp16"],
    ),
    # the state of the optimizer
    (
        "--exp-avg-dtype bf16",
        "",
        None,
        ["--exp-avg-dtype bf16: belongs to --use-precision-aware-optimizer"],
    ),
    (
        "--use-precision-aware-optimizer --optimizer sgd",
        "",
        None,
        ["--use-precision-aware-optimizer: is for the state of adam", "--optimizer is sgd"],
    ),
    ("--use-precision-aware-optimizer --fp64", "", None, ["--use-precision-aware-optimizer", "less than fp64"]),
    (
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --fp16",
        "",
        None,
        ["--main-grads-dtype bf16", "the precision is fp16"],
    ),
    (
        "--use-precision-aware-optimizer --main-grads-dtype bf16 --bf16 --accumulate-allreduce-grads-in-fp32",
        "",
        None,
        ["--accumulate-allreduce-grads-in-fp32", "--main-grads-dtype bf16 ask for opposite things"],
    ),
    (
        "--use-precision-aware-optimizer --main-grads-dtype fp32 --bf16 --grad-reduce-in-bf16",
        "",
        None,
        ["--main-grads-dtype fp32 and --grad-reduce-in-bf16 ask for opposite things"],
    ),
    ("--main-grads-dtype fp32 --fp64", "", None, ["--main-grads-dtype fp32: is less than fp64"]),
    ("--exp-avg-dtype fp32 --fp64", "", None, ["--exp-avg-dtype fp32: is less than fp64"]),
    (
        "--use-precision-aware-optimizer --bf16 --kernels apex",
        "",
        None,
        ["--kernels apex", "--use-precision-aware-optimizer"],
    ),
    ("--muon-momentum 0.95", "", None, ["--muon-momentum 0.95: belongs to --optimizer muon, and that is adam"]),
    ("--muon-no-split-qkv", "", None, ["--muon-no-split-qkv: belongs to --optimizer muon"]),
    (
        "--optimizer muon --muon-num-ns-steps 4",
        "",
        None,
        ["--muon-num-ns-steps 4", "multiple of 5", "--muon-coefficient-type simple"],
    ),
    (
        "--optimizer muon --muon-fp32-matmul-prec high --bf16 --grad-reduce-in-bf16",
        "",
        None,
        ["--muon-fp32-matmul-prec high: orthogonalizes in fp32", "these are bf16", "--muon-fp32-matmul-prec medium"],
    ),
    ("--fp32-residual-connection --fp64", "", None, ["--fp32-residual-connection", "the precision is fp64"]),
    (
        "--rotary-percent 0.5",
        "",
        None,
        ["--rotary-percent", "learned_absolute", "--position-embedding-type rope"],
    ),
    ("--position-embedding-type rope --rotary-percent 1.5", "", None, ["--rotary-percent 1.5", "at most 1"]),
    ("--position-embedding-type rope --rotary-percent 0.4", "", None, ["rotates 3 of the 8", "even"]),
    ("--rope-scaling-factor 4", "", None, ["--rope-scaling-factor 4.0", "--use-rope-scaling"]),
    ("--window-size 4 1", "", None, ["--window-size 4 1", "back only"]),
    ("--window-size -2 0", "", None, ["--window-size -2 0", "at least -1", "--window-size -1 0"]),
    ("--norm-epsilon 0", "", None, ["--norm-epsilon 0.0", "more than 0"]),
    ("--seq-length 64", "", None, ["--seq-length 64", "--max-position-embeddings 32"]),
    ("", "--max-position-embeddings", None, ["--max-position-embeddings", "32 or more"]),
    # parallelism
    (
        "--tensor-model-parallel-size 3 --ffn-hidden-size 240",
        "",
        3,
        ["--num-attention-heads 8", "parallel-size 3", "6 or 9", "1, 2 or 4"],
    ),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6 "
        "--num-attention-heads 12 --hidden-size 96 --global-batch-size 4",
        "",
        8,
        ["--num-query-groups 6", "parallel-size 4", "4 or 8"],
    ),
    ("--ffn-hidden-size 101 --tensor-model-parallel-size 2", "", 2, ["--ffn-hidden-size 101", "100 or 102"]),
    ("--sequence-parallel", "", 1, ["--sequence-parallel", "--tensor-model-parallel-size is 1"]),
    (
        "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 31",
        "",
        2,
        ["--seq-length 31", "30 or 32"],
    ),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "",
        6,
        ["2 x pipeline 2", "4 processes", "the 6 started", "4 or 8"],
    ),
    ("--context-parallel-size 2", "", 2, ["--context-parallel-size 2", "not available in this version"]),
    ("--world-size 0", "", None, ["--world-size 0", "at least 1"]),
    ("--world-size 4", "", 8, ["--world-size 4", "has started, 8"]),
    (
        "--num-virtual-stages-per-pipeline-rank 2",
        "",
        None,
        ["--num-virtual-stages-per-pipeline-rank 2", "is 1"],
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers-per-virtual-pipeline-stage 2",
        "",
        2,
        ["--num-layers-per-virtual-pipeline-stage 2", "the same", "one of the two"],
    ),
    (
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
        "",
        4,
        ["--microbatch-group-size-per-virtual-pipeline-stage 2", "at least", "4"],
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tttttL "
        "--decoder-first-pipeline-num-layers 3",
        "",
        2,
        ["--decoder-first-pipeline-num-layers 3", "--pipeline-model-parallel-layout"],
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "",
        1,
        ["--microbatch-group-size-per-virtual-pipeline-stage 4", "one model chunk"],
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tttttL "
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        "",
        2,
        ["--microbatch-group-size-per-virtual-pipeline-stage 4", "one model chunk", "several parts"],
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tt|tt|ttL "
        "--microbatch-group-size-per-virtual-pipeline-stage 1",
        "",
        2,
        ["--microbatch-group-size-per-virtual-pipeline-stage 1", "at least --pipeline-model-parallel-size 2"],
    ),
    ("--decoder-last-pipeline-num-layers 3", "", 1, ["--decoder-last-pipeline-num-layers 3", "2 or more"]),
    ("--pipeline-model-parallel-size 9", "", 9, ["--num-layers 8", "9"]),
    (
        "--pipeline-model-parallel-size 2 --num-layers 1",
        "",
        2,
        ["--num-layers 1", "--pipeline-model-parallel-size 1; --pipeline-model-parallel-layout"],
    ),
    ("--pipeline-model-parallel-layout EL", "", 1, ["layout 'EL': has no layer", "Et*8L"]),
    ("--pipeline-model-parallel-layout Et*0|ttL", "", 1, ["repeats t 0 times", "leave out t*0"]),
    ("--pipeline-model-parallel-layout Et*1000000000|L", "", 1, ["repeats t too often: 1000000000 times"]),
    (f"--pipeline-model-parallel-layout Et*{'9' * 5000}|L", "", 1, ["repeats t too often: 999999999999 times"]),
    # data parallelism
    (
        "--overlap-param-gather",
        "",
        2,
        ["--overlap-param-gather", "needs --use-distributed-optimizer and --overlap-grad-reduce"],
    ),
    (
        "--overlap-param-gather --use-distributed-optimizer",
        "",
        2,
        ["--overlap-param-gather", "needs --overlap-grad-reduce", "--overlap-grad-reduce with it"],
    ),
    (
        "--overlap-param-gather --use-distributed-optimizer --overlap-grad-reduce --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl linear",
        "",
        2,
        ["--overlap-param-gather", "without calling it", "--cross-entropy-fusion-impl native"],
    ),
    ("--ddp-bucket-size 100", "", 2, ["--ddp-bucket-size 100", "needs --overlap-grad-reduce"]),
    ("--ddp-num-buckets 4", "", 2, ["--ddp-num-buckets 4", "needs --overlap-grad-reduce"]),
    (
        "--overlap-grad-reduce --ddp-num-buckets 4 --ddp-bucket-size 100",
        "",
        2,
        ["--ddp-bucket-size 100", "--ddp-num-buckets 4", "one of the two"],
    ),
    ("--overlap-grad-reduce --ddp-bucket-size 0", "", 2, ["--ddp-bucket-size 0", "at least 1"]),
    (
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "",
        2,
        ["--ddp-pad-buckets-for-high-nccl-busbw", "needs --use-distributed-optimizer"],
    ),
    ("--grad-reduce-in-bf16", "", 2, ["--grad-reduce-in-bf16", "the precision is fp32", "--bf16 with it"]),
    (
        "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
        "",
        2,
        ["--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16 ask for opposite things"],
    ),
    # batches
    ("--global-batch-size 18", "", 4, ["--global-batch-size 18", "2 x data-parallel size 4 = 8", "16 or 24"]),
    ("", "--micro-batch-size", 4, ["--micro-batch-size", "must be given"]),
    ("--micro-batch-size 0", "", 4, ["--micro-batch-size 0", "at least 1"]),
    # the horizon and the schedules
    ("--train-samples 100", "", None, ["--train-iters 100", "--train-samples 100", "one of the two"]),
    ("", "--train-iters", None, ["--train-iters", "length of the run"]),
    ("--train-samples 15", "--train-iters", None, ["--train-samples 15", "first global batch of 16", "16 or more"]),
    ("--train-samples 7", "--train-iters --global-batch-size", 4, ["--train-samples 7", "first global batch of 8"]),
    (
        "--train-samples 3 --rampup-batch-size 4 4 100",
        "--train-iters",
        None,
        ["--train-samples 3", "first global batch of 4"],
    ),
    ("--train-iters 1e11", "", None, ["--train-iters 100_000_000_000", "x 16 samples", "6_250_000_000 or less"]),
    ("--eval-iters 1e10", "", None, ["--eval-iters 10_000_000_000", "x 1 evaluations", "6_250_000_000 or less"]),
    ("--eval-iters 1e9 --eval-interval 1", "", None, ["--eval-iters 1_000_000_000", "x 101 evaluations"]),
    ("", "--lr", None, ["--lr", "must be given"]),
    ("--lr 0", "", None, ["--lr 0.0", "more than 0", "--lr 0.0001"]),
    ("--min-lr 1", "", None, ["--min-lr 1.0", "--lr 0.001"]),
    ("--lr-decay-samples 10", "", None, ["--lr-decay-samples 10", "--train-iters 100", "--lr-decay-iters N"]),
    ("--lr-warmup-samples 10", "", None, ["--lr-warmup-samples 10", "--lr-warmup-iters N"]),
    (
        "--train-samples 800 --lr-decay-iters 9",
        "--train-iters",
        None,
        ["--lr-decay-iters 9", "--lr-decay-samples N"],
    ),
    ("--lr-warmup-iters 100", "", None, ["--lr-warmup-iters 100", "--train-iters 100", "--lr-warmup-iters 99 or less"]),
    (
        "--lr-warmup-samples 640 --train-samples 160",
        "--train-iters",
        None,
        ["--lr-warmup-samples 640", "--lr-warmup-samples 159 or less", "--lr-decay-samples 641 or more"],
    ),
    ("--lr-warmup-iters 50 --lr-decay-iters 50", "", None, ["--lr-warmup-iters 50", "--lr-decay-iters 50"]),
    (
        "--lr-warmup-iters 5 --lr-warmup-fraction 0.1",
        "",
        None,
        ["--lr-warmup-iters 5", "--lr-warmup-fraction 0.1"],
    ),
    ("--lr-warmup-fraction 1", "", None, ["--lr-warmup-fraction 1.0", "less than 1"]),
    ("--lr-decay-style WSD", "", None, ["--lr-decay-style WSD", "--lr-wsd-decay-iters N"]),
    ("--lr-wsd-decay-iters 5", "", None, ["--lr-wsd-decay-iters 5", "linear"]),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-iters 10",
        "",
        None,
        ["--lr-wsd-decay-iters 95", "90 or less"],
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 95 --lr-warmup-fraction 0.1",
        "",
        None,
        ["--lr-wsd-decay-iters 95", "90 or less"],
    ),
    (
        "--lr-decay-style WSD --lr-wsd-decay-iters 1 --lr-decay-iters 1 --lr-warmup-fraction 0.1",
        "",
        None,
        ["--lr-wsd-decay-iters 1", "--lr-decay-iters 2 or more"],
    ),
    ("--start-weight-decay 0.1", "", None, ["--start-weight-decay 0.1", "constant"]),
    (
        "--weight-decay-incr-style linear --start-weight-decay 0",
        "",
        None,
        ["--end-weight-decay", "both ends"],
    ),
    ("--adam-beta2 1", "", None, ["--adam-beta2 1.0", "less than 1"]),
    ("--clip-grad -1", "", None, ["--clip-grad -1.0", "at least 0"]),
    ("--loss-scale 128 --bf16", "", None, ["--loss-scale 128.0", "only fp16", "bf16"]),
    ("--fp16 --loss-scale 128 --hysteresis 3", "", None, ["--hysteresis 3", "--loss-scale 128.0"]),
    # data and tokenizer
    ("--data-path corpus", "", None, ["--mock-data", "--data-path"]),
    ("", "--mock-data", None, ["--data-path", "nothing to train on", "--mock-data"]),
    ("--valid-data-path a", "--mock-data", None, ["--train-data-path", "nothing to train on: --valid-data-path"]),
    ("--split 0,1,1", "", None, ["--split 0,1,1", "nothing to train on"]),
    ("--null-tokenizer-eod-id 100", "", None, ["--null-tokenizer-eod-id 100", "less than --vocab-size 100"]),
    ("--padded-vocab-size 99", "", None, ["--padded-vocab-size 99", "--vocab-size 100"]),
    ("", "--vocab-size", None, ["--vocab-size", "NullTokenizer is made from"]),
    ("--merge-file m.txt", "", None, ["--merge-file m.txt", "NullTokenizer does not use it"]),
    ("--tokenizer-type BertWordPieceCase", "", None, ["--vocab-file", "BertWordPieceCase is made from --vocab-file"]),
    ("--tiktoken-pattern v1", "", None, ["--tiktoken-pattern v1", "belongs to TikTokenizer"]),
    (
        "--tokenizer-type TikTokenizer --tokenizer-model t.json --tiktoken-special-tokens </s> <s> <s>",
        "",
        None,
        [
            "--tiktoken-special-tokens </s> <s> <s>: <s> must stand there once",
            "Works: --tiktoken-special-tokens </s> <s>",
        ],
    ),
    (
        "--tokenizer-type TikTokenizer --tokenizer-model t.json --tiktoken-special-tokens </s> <s> "
        "--tiktoken-num-special-tokens 1",
        "",
        None,
        ["--tiktoken-num-special-tokens 1", "the 2 that are named"],
    ),
    # checkpoints and reports
    ("--save-interval 10", "", None, ["--save-interval 10", "--save DIR"]),
    ("--keep-last 3", "", None, ["--keep-last 3", "--save DIR; or leave out --keep-last"]),
    ("--async-save", "", None, ["--async-save: says how to save", "--save DIR; or leave out --async-save"]),
    ("--save x --keep-last 0", "", None, ["--keep-last 0", "at least 1", "--keep-last 1"]),
    (
        "--save x --save-interval 10 --save-retain-interval 25",
        "",
        None,
        ["--save-retain-interval 25", "multiple of --save-interval (10)", "Works: --save-retain-interval 20"],
    ),
    (
        "--save x --save-interval 10 --save-retain-interval 4",
        "",
        None,
        ["--save-retain-interval 4", "Works: --save-retain-interval 10"],
    ),
    ("--finetune", "", None, ["--finetune", "--load DIR"]),
    ("--ckpt-step 3", "", None, ["--ckpt-step 3", "--load DIR"]),
    ("--load c --ckpt-step -1", "", None, ["--ckpt-step -1", "must be at least 0", "--ckpt-step 0"]),
    ("--no-load-optim", "", None, ["--no-load-optim", "--load DIR"]),
    (
        "--load x --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler",
        "",
        None,
        ["--override-opt_param-scheduler", "opposite"],
    ),
    ("--log-interval 0", "", None, ["--log-interval 0", "at least 1"]),
    ("--timing-log-level 3", "", None, ["--timing-log-level 3", "at least 0 and at most 2", "--timing-log-level 2"]),
    ("--log-timers-to-tensorboard", "", None, ["--log-timers-to-tensorboard", "--tensorboard-dir DIR"]),
    ("--exit-signal SIGINT", "", None, ["--exit-signal SIGINT", "--exit-signal-handler"]),
    ("--skip-train", "--mock-data", None, ["--data-path", "nothing to evaluate", "--valid-data-path PREFIX"]),
    (
        "--skip-train --train-data-path a",
        "--mock-data",
        None,
        ["--valid-data-path", "nothing to evaluate: --train-data-path gives the other part"],
    ),
    ("--skip-train --split 1", "", None, ["--split 1", "nothing to evaluate: the shares of validation and test are 0"]),
    ("--skip-train --eval-iters 0", "", None, ["--eval-iters 0: leaves nothing to do", "--eval-iters 100"]),
    ("--eval-iters -2", "", None, ["--eval-iters -2", "at least -1", "--eval-iters -1"]),
    ("--seed -1", "", None, ["--seed -1", "at least 0", "--seed 0"]),
]


@pytest.mark.parametrize("line, without, world_size, words", REFUSED, ids=[row[0] or row[1] for row in REFUSED])
def test_a_broken_rule_is_refused_in_words(
    refused: Refused, line: str, without: str, world_size: int | None, words: list[str]
) -> None:
    text = refused(line, without=without, world_size=world_size)
    for word in words:
        assert word in text


WORKS = [
    ("--hidden-size 60 --num-attention-heads 8 --kv-channels 7", 1),
    ("--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 2", 2),
    ("--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 8 --global-batch-size 16", 8),
    ("--position-embedding-type rope --seq-length 4096", 1),
    ("--position-embedding-type rope --rotary-percent 0.5 --use-rope-scaling --rope-scaling-factor 32", 1),
    ("--window-size -1 0", 1),
    ("--window-size 15,0", 1),
    ("--tensor-model-parallel-size 2 --sequence-parallel", 4),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", 2),
    ("--pipeline-model-parallel-size 3", 3),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3", 2),
    ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tttttL", 2),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tt|tt|ttL "
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
        2,
    ),
    ("--pipeline-model-parallel-size 2 --pipeline-schedule gpipe", 2),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 90 --lr-warmup-iters 10", 1),
    ("--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1", 1),
    ("--fp16 --initial-loss-scale 65536 --loss-scale-window 500", 1),
    ("--padded-vocab-size 128 --tensor-model-parallel-size 2", 2),
    ("--skip-train --train-iters 6250000000", 1),
    ("--lr-decay-iters 990000", 1),
    ("--load x --load-if-exists --save x --save-interval 10", 1),
    ("--save x --save-interval 10 --save-retain-interval 20 --keep-last 2 --async-save", 1),
    ("--vocab-size 50257 --tensor-model-parallel-size 8 --make-vocab-size-divisible-by 1", 8),
]


@pytest.mark.parametrize("line, world_size", WORKS)
def test_what_keeps_the_rules_is_accepted(parse: Parse, line: str, world_size: int) -> None:
    parse(line, world_size=world_size)


@pytest.mark.parametrize("flag", ["--loss-scale", "--initial-loss-scale", "--min-loss-scale"])
@pytest.mark.parametrize("scale", ["1e-310", str(2.0**-127), str(2.0**127), "1e+39"])
def test_a_loss_scale_that_fp32_cannot_multiply_with_or_divide_by_is_refused(
    flag: str, scale: str, refused: Refused, parse: Parse
) -> None:
    text = refused(f"--fp16 {flag} {scale}")
    assert f"{flag} {scale}: it and its reciprocal must be normal numbers of fp32" in text
    assert f"Works: {flag} 4096; or leave it out" in text
    parse(f"--fp16 {flag} 4096")


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_the_outermost_loss_scales_are_taken(scale: float, parse: Parse) -> None:
    assert parse(f"--fp16 --loss-scale {scale}").optimizer.loss_scale == scale
    parse(f"--fp16 --initial-loss-scale {scale} --min-loss-scale {2.0**-126}")


@pytest.mark.parametrize(
    "line, dtype",
    [
        ("--main-grads-dtype bf16 --grad-reduce-in-bf16", torch.bfloat16),
        ("--main-grads-dtype bf16", torch.bfloat16),
        ("--grad-reduce-in-bf16", torch.bfloat16),
        ("--main-grads-dtype fp32 --accumulate-allreduce-grads-in-fp32", torch.float32),
        ("", torch.float32),
    ],
)
def test_flags_that_agree_on_the_type_of_gradients_are_honoured(line: str, dtype: torch.dtype, parse: Parse) -> None:
    config = parse(f"--bf16 --use-precision-aware-optimizer {line}")
    assert config.optimizer.grad_dtype == dtype


def test_saying_the_types_that_hold_anyway_changes_nothing_on_a_resume(parse: Parse) -> None:
    said = "--main-grads-dtype fp32 --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32"
    assert difference(parse(), parse(said)) == []
    changed = difference(parse(), parse("--bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16"))
    assert [change.flag for change in changed] == ["--precision", "--use-precision-aware-optimizer", "--exp-avg-dtype"]


def test_all_problems_are_reported_at_once(refused: Refused) -> None:
    text = refused(
        "--hidden-size 60 --tensor-model-parallel-size 3 --lr 1e-3x --train-samples 7 --num-experts 8 "
        "--hiden-size 3 --global-batch-size 7",
        world_size=6,
        problems=7,
    )
    for words in ("60", "parallel-size 3", "1e-3x", "--train-samples 7", "--num-experts 8", "--hiden-size"):
        assert words in text
    assert text.startswith("7 problems in the configuration:")


def test_a_rule_that_each_of_two_contradicting_flags_breaks_is_reported_beside_them(refused: Refused) -> None:
    text = refused("--fp64 --fp16 --grad-reduce-in-bf16", problems=2)
    assert "--fp16 and --fp64 give precision different values" in text
    assert "--grad-reduce-in-bf16: rounds gradients to bf16, and the precision is fp64" in text


@pytest.mark.parametrize("line", ["--fp64 --bf16", "--bf16 --fp64", "--fp16 --fp64 --bf16"])
def test_a_rule_that_one_of_two_contradicting_flags_keeps_is_not_reported(line: str, refused: Refused) -> None:
    text = refused(f"{line} --grad-reduce-in-bf16", problems=line.count("--") - 1)
    assert "rounds gradients" not in text


def test_tensor_parallel_sizes_that_are_said_to_work_do(refused: Refused, parse: Parse) -> None:
    line = "--num-attention-heads 12 --hidden-size 96 --ffn-hidden-size 200 --seq-length 30 --sequence-parallel"
    text = refused(f"{line} --tensor-model-parallel-size 3 --global-batch-size 2", world_size=3)
    assert "--ffn-hidden-size 200: must be divisible by --tensor-model-parallel-size 3" in text
    assert "; --tensor-model-parallel-size 2\n" in text + "\n"
    parse(f"{line} --tensor-model-parallel-size 2 --global-batch-size 2", world_size=2)


def test_a_rule_about_an_unreadable_value_is_not_reported_on_top(refused: Refused) -> None:
    text = refused("--hidden-size big --tensor-model-parallel-size 2", world_size=2)
    assert "--hidden-size big: must be a whole number" in text


def test_every_flag_named_in_a_refusal_exists(parse: Parse) -> None:
    from megatron.config.arguments import _spellings
    from megatron.config.megatron_flags import known_flag

    for line, without, world_size, _ in REFUSED:
        with pytest.raises(ConfigError) as caught:
            parse(line, without=without, world_size=world_size)
        for word in str(caught.value).replace(";", " ").replace(",", " ").replace(":", " ").split():
            if word.startswith("--"):
                name = word.replace("_", "-").strip(".)('")
                assert name in _spellings() or known_flag(name), word


@pytest.mark.parametrize(
    "ramp, batch, micro, replicas, words",
    [
        ("32 4 100", 32, 2, 2, ["START 32 must be less than --global-batch-size 32", "leave out"]),
        (
            "10 3 100",
            32,
            1,
            1,
            ["from 10 to --global-batch-size 32 is 22", "INCREMENT 3", "10 2 100", "31 or"],
        ),
        ("6 4 100", 30, 2, 2, ["START 6", "2 x data-parallel size 2 = 4"]),
        ("4 6 100", 28, 2, 2, ["INCREMENT 6", "2 x data-parallel size 2 = 4"]),
        ("0 6 100", 12, 1, 1, ["at least 1"]),
    ],
)
def test_a_batch_ramp_that_cannot_be_is_refused(
    refused: Refused, ramp: str, batch: int, micro: int, replicas: int, words: list[str]
) -> None:
    wrong_batch = batch % (micro * replicas) != 0
    text = refused(
        f"--train-samples 9999 --rampup-batch-size {ramp} --global-batch-size {batch} --micro-batch-size {micro}",
        without="--train-iters",
        world_size=replicas,
        problems=2 if wrong_batch else 1,
    )
    for word in words:
        assert word in text


def test_a_run_without_training_needs_no_samples_for_a_step(parse: Parse) -> None:
    parse("--skip-train --train-samples 1", without="--train-iters")


@pytest.mark.parametrize("line", ["--valid-data-path a", "--test-data-path a", "--mock-data --split 0,1,0"])
def test_a_run_that_only_evaluates_needs_no_training_data(parse: Parse, line: str) -> None:
    parse(f"--skip-train {line}", without="--mock-data")


def test_a_batch_ramp_counts_samples(refused: Refused) -> None:
    text = refused("--rampup-batch-size 8 4 100", world_size=1)
    assert "--train-samples 1600 in place of --train-iters 100" in text


@pytest.mark.parametrize("start", ["5 1", "4 2", "1 1"])
def test_the_interleaved_schedule_takes_any_number_of_micro_batches(start: str, parse: Parse) -> None:
    line = (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --train-samples 9999 "
        "--micro-batch-size 1 --global-batch-size 16 --rampup-batch-size {} 100"
    )
    parse(line.format(start), without="--train-iters", world_size=2)


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "1,2,3,4", "", "90 5 5", "nan,1,1", "1e3,1,1"])
def test_a_split_that_is_not_one_to_three_shares_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        parse_arguments([*command_line(), "--split", split])


@pytest.mark.parametrize(
    "split, shares",
    [
        ("969, 30, 1", (0.969, 0.03, 0.001)),
        ("1", (1.0, 0.0, 0.0)),
        ("100,0,0", (1.0, 0.0, 0.0)),
        ("99990,8,2", (0.9999, 0.00008, 0.00002)),
        ("1,1", (0.5, 0.5, 0.0)),
    ],
)
def test_a_split_is_shares_of_one(split: str, shares: tuple[float, ...]) -> None:
    config, _ = parse_arguments([*command_line(), "--split", split])
    assert config.data.split_weights == pytest.approx(shares, rel=1e-12)


def test_a_split_that_is_not_given_is_megatron_lm_s_and_even_for_mock_data(parse: Parse) -> None:
    mock, real = parse(), parse("--data-path a", without="--mock-data")
    assert mock.data.split is real.data.split is None
    assert mock.data.split_weights == (1 / 3, 1 / 3, 1 / 3)
    assert real.data.split_weights == pytest.approx((0.969, 0.03, 0.001), rel=1e-12)


def test_a_split_beside_a_path_for_each_part_is_refused_also_where_it_is_the_default(refused: Refused) -> None:
    text = refused("--train-data-path a --split 969,30,1", without="--mock-data")
    assert "--split 969,30,1: divides --data-path" in text


def test_a_choice_that_no_flag_could_have_given_is_refused(parse: Parse) -> None:
    config = parse()
    wrong = replace(
        config,
        optimizer=replace(config.optimizer, optimizer="lion"),
        tokenizer=replace(config.tokenizer, tokenizer_type="Words"),
    )
    with pytest.raises(ConfigError, match=r"(?s)--optimizer lion: is not a known value.*--tokenizer-type Words"):
        wrong.validate()


def test_the_price_of_attention_dropout_is_known_at_the_start(parse: Parse) -> None:
    (note,) = parse(
        "--tensor-model-parallel-size 2 --bf16 --seq-length 1024 --max-position-embeddings 1024"
    ).start_notes()
    # 4 heads of a rank, softmax and what dropout leaves of it in bf16
    assert "keeps 33.6 MB of attention weights" in note
    assert "4 heads x 1024 x 1024 x 2 samples x 4 bytes" in note
    assert "--fast-attention-dropout" in note
    (note,) = parse("--fast-attention-dropout").start_notes()
    assert "masks follow from --seed, but depend on --tensor-model-parallel-size and --micro-batch-size" in note
    (note,) = parse("--recompute-activations").start_notes()
    assert "keeps" not in note and "no flash kernel runs" in note
    assert parse("--attention-dropout 0").start_notes() == []


@pytest.mark.parametrize(
    "line, note",
    [
        ("--recompute-activations --attention-dropout 0", "which runs in a fused kernel: that keeps no attention"),
        ("--recompute-activations --attention-dropout 0.1 --fast-attention-dropout", "which on GPUs runs in a fused"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 8", "spares nothing"),
    ],
)
def test_recomputation_that_spares_next_to_nothing_is_said_at_the_start(parse: Parse, line: str, note: str) -> None:
    assert note in parse(line).start_notes()[-1]


@pytest.mark.parametrize(
    "line",
    [
        "--recompute-activations --recompute-modules mlp --attention-dropout 0",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 7 --attention-dropout 0",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 8 --attention-dropout 0 "
        "--pipeline-model-parallel-size 2",
    ],
)
def test_recomputation_that_spares_memory_needs_no_word(parse: Parse, line: str) -> None:
    assert parse(line).start_notes() == []


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    "line, text",
    [
        ("--recompute-granularity full", "needs --recompute-method and --recompute-num-layers"),
        ("--recompute-granularity full --recompute-method block", "needs --recompute-num-layers"),
        ("--recompute-method uniform", "belongs to --recompute-granularity full, and it is not given"),
        ("--recompute-activations --recompute-num-layers 1", "full, and it is selective"),
        (f"{FULL} --recompute-modules mlp", "belongs to --recompute-granularity selective, and it is full"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 9", "more than --num-layers 8"),
        ("--recompute-activations --recompute-modules moe_act", "is a part of mixtures of experts"),
        ("--recompute-activations --recompute-modules core_attn softmax", "is not a known part of a layer"),
        ("--distribute-saved-activations --tensor-model-parallel-size 2", "belongs to --recompute-granularity full"),
        (f"{FULL} --distribute-saved-activations", "--tensor-model-parallel-size is 1"),
        (
            f"{FULL} --distribute-saved-activations --tensor-model-parallel-size 2 --sequence-parallel",
            "keeps its part of the sequence only",
        ),
        ("--checkpoint-activations", "--recompute-granularity full"),
        ("--activations-checkpoint-method uniform", "--recompute-granularity full"),
        ("--distribute-checkpointed-activations", "--distribute-saved-activations"),
    ],
)
def test_recomputation_that_can_not_be_is_refused(refused: Refused, line: str, text: str) -> None:
    assert text in refused(line)


@pytest.mark.parametrize(
    "line, works",
    [
        ("--recompute-method block", "--recompute-num-layers 1 or more; or --recompute-method uniform"),
        ("--recompute-num-layers 3", "--recompute-method uniform"),
        ("", "--recompute-method uniform --recompute-num-layers 1"),
        ("--recompute-method block --recompute-num-layers 9", "--recompute-num-layers 8, which are all"),
        (
            "--recompute-method uniform --recompute-num-layers 9",
            "--recompute-num-layers 8, which are all; or --recompute-num-layers 1, which keeps least",
        ),
        (
            "--recompute-method block --recompute-num-layers 9 --pipeline-model-parallel-size 2 "
            "--decoder-first-pipeline-num-layers 3",
            "--recompute-num-layers 5, which are all of a stage",
        ),
        (
            "--recompute-method block --recompute-num-layers 9 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "--recompute-num-layers 2, which are all of a model chunk of a stage",
        ),
    ],
)
def test_full_recomputation_is_completed_or_corrected_by_what_changes_least(
    line: str, works: str, refused: Refused, parse: Parse
) -> None:
    line = f"--recompute-granularity full {line}"
    assert f"Works: {works}" in refused(line)
    proposed = re.findall(r"--[a-z-]+ [a-z0-9]+", works.partition(";")[0])
    parse(f"{line} {' '.join(proposed)}")


def test_what_full_recomputation_was_asked_for_stays_in_what_is_proposed(refused: Refused) -> None:
    text = refused("--recompute-method block --recompute-num-layers 2", problems=2)
    whole = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    assert text.count(f"Works: {whole}; or leave out") == 2


def test_layers_to_recompute_beyond_all_are_reported_beside_what_is_wrong_with_the_layout(refused: Refused) -> None:
    line = "--recompute-granularity full --recompute-method block --recompute-num-layers 9"
    text = refused(f"{line} --pipeline-model-parallel-size 9", problems=2)
    assert "Works: --recompute-num-layers 8, which are all" in text


def test_the_short_flag_is_the_selective_granularity(parse: Parse) -> None:
    model = parse("--recompute-activations").model
    assert model.recomputed_modules == ("core_attn",)
    assert parse(f"{FULL}").model.recomputed_modules == ()


def test_layers_are_cut_into_units_of_which_the_input_is_kept(parse: Parse) -> None:
    def units(line: str) -> list[tuple[list[int], bool]]:
        return [(list(unit.layers), unit.recomputed) for unit in parse(line).model.recompute_units(range(2, 7))]

    full = "--recompute-granularity full --recompute-num-layers 2 --recompute-method"
    assert units(f"{full} uniform") == [([2, 3], True), ([4, 5], True), ([6], True)]
    assert units(f"{full} block") == [([2], True), ([3], True), ([4, 5, 6], False)]
    assert units("--recompute-activations") == units("") == [([2, 3, 4, 5, 6], False)]


def test_the_price_of_scaled_scores_is_known_at_the_start(parse: Parse) -> None:
    (note,) = parse("--attention-dropout 0 --apply-query-key-layer-scaling").start_notes()
    assert "no flash kernel runs" in note
    assert parse("--attention-dropout 0 --no-query-key-layer-scaling").start_notes() == []


def test_a_second_moment_that_cannot_fall_is_said_at_the_start(parse: Parse) -> None:
    line = "--attention-dropout 0 --bf16 --use-precision-aware-optimizer --exp-avg-sq-dtype bf16"
    (note,) = parse(line).start_notes()
    assert "--exp-avg-sq-dtype bf16 with --adam-beta2 0.999: a second moment never becomes less" in note
    assert parse(f"{line} --adam-beta2 0.95").start_notes() == []


def test_a_wide_residual_stream_is_what_stages_send(parse: Parse) -> None:
    assert parse("--bf16").hidden_dtype == torch.bfloat16
    assert parse("--fp16 --fp32-residual-connection").hidden_dtype == torch.float32
    assert parse("--fp64").hidden_dtype == torch.float64


def test_the_default_sizes_are_those_of_megatron_lm() -> None:
    sizes = {"num_layers": 2, "hidden_size": 4096, "num_attention_heads": 32}
    plain = TransformerConfig(**sizes)
    assert (plain.ffn_size, plain.head_dim, plain.query_groups) == (16384, 128, 32)
    gated = TransformerConfig(**sizes, activation="swiglu", group_query_attention=True)
    assert (gated.ffn_size, gated.query_groups) == (int((4 * 4096 * 2 / 3) / 64) * 64, 1)


def test_missing_tokenizer_files_and_corpora_are_found_before_the_start(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    for end in (".bin", ".idx"):
        (tmp_path / f"corpus_text_document{end}").write_bytes(b"")
    line = (
        f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path}/vocab.jsn "
        f"--merge-file {tmp_path}/nowhere/m.txt "
        f"--data-path 0.5 {tmp_path}/corpus_text_document 0.5 {tmp_path}/corpus"
    )
    text = refused(line, without="--mock-data --vocab-size", problems=3, check_files=True)
    assert f"--vocab-file {tmp_path}/vocab.jsn: no such file" in text
    assert "vocab.json" in text
    assert f"there is no folder {tmp_path}/nowhere" in text
    assert f"--data-path {tmp_path}/corpus: no file {tmp_path}/corpus.bin" in text
    assert f"{tmp_path}/corpus_text_document" in text
    text = refused(f"--data-path {tmp_path}/corpus_text_document.bin", without="--mock-data", check_files=True)
    assert "corpus_text_document (without the ending)" in text


@pytest.mark.parametrize(
    ("kind", "flag", "name", "named"),
    [
        ("GPT2BPETokenizer", "vocab_file", "vocab.jsn", "vocab.json, other.json"),
        ("GPT2BPETokenizer", "vocab_file", "vocab.txt", "vocab.json, other.json"),
        ("GPT2BPETokenizer", "merge_file", "x", "merges.txt"),
        ("HuggingFaceTokenizer", "tokenizer_model", "other", "other.json, vocab.json"),
        ("SentencePieceTokenizer", "tokenizer_model", "absent", "1.model, 2.model, 3.model, 4.model, 5.model, …"),
    ],
)
def test_of_the_files_beside_a_missing_one_those_of_its_kind_are_named(
    tmp_path: Path, kind: str, flag: str, name: str, named: str
) -> None:
    others = (
        "vocab.json",
        "other.json",
        "._vocab.json",
        "README.md",
        "merges.txt",
        *(f"{n}.model" for n in range(1, 7)),
    )
    for other in others:
        (tmp_path / other).touch()
    config = TokenizerConfig(tokenizer_type=kind, **{flag: str(tmp_path / name)})
    (problem,) = config.file_problems()
    assert problem.works == f"in {tmp_path} are {named}"


def test_a_folder_without_a_file_of_the_kind_says_how_such_files_end(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    (problem,) = TokenizerConfig(
        tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "vocab.tiktoken")
    ).file_problems()
    assert problem.works == f"an existing file; {tmp_path} has none that ends in .json or .model"


@pytest.mark.parametrize("there", [4, 5, 6])
def test_of_many_corpora_beside_a_missing_one_some_are_named_and_three_dots_say_so(
    tmp_path: Path, refused: Refused, there: int
) -> None:
    for number in range(there):
        (tmp_path / f"{number}.idx").touch()
    text = refused(f"--data-path {tmp_path}/none", without="--mock-data", check_files=True)
    named = [f"{tmp_path}/{number}" for number in range(min(there, 5))]
    assert text.endswith(f"in that folder are {', '.join(named + ['…'] * (there > 5))}")


@pytest.mark.parametrize(
    "words, rule",
    [
        ("0.5 a b", "have weights"),
        ("0.5 a 0.5", "have weights"),
        ("a b 1 c", "have weights"),
        ("-1 a 2 b", "must be a positive number"),
        ("0 a 0 b", "must be a positive number"),
        ("3", "without a prefix"),
    ],
)
def test_a_blend_that_is_neither_weighted_nor_plain_is_refused(words: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse_arguments([*command_line("", "--mock-data"), "--data-path", *words.split()], check_files=False)


def test_weights_whose_sum_is_beyond_every_number_are_refused() -> None:
    with pytest.raises(ValueError, match="the sum of the weights is more than a number can hold"):
        parse_blend(["1e308", "a", "1e308", "b"])


@pytest.mark.parametrize("weight", ["0", "-0.1", "nan", "inf"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_weight_that_is_not_positive_is_refused_wherever_it_stands(weight: str, place: int) -> None:
    words = ["0.4", "a", "0.6", "b"]
    words[2 * place : 2 * place] = [weight, "c"]
    with pytest.raises(ValueError, match=rf"^{weight} c: a weight must be a positive number"):
        parse_blend(words)


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", None),
        ("a", Blend(prefixes=("a",))),
        ("a b c", Blend(prefixes=("a", "b", "c"))),
        ("a b", Blend(prefixes=("a", "b"))),
        ("0.3 a 0.7 b", Blend(prefixes=("a", "b"), weights=(0.3, 0.7))),
        ("1 a", Blend(prefixes=("a",), weights=(1.0,))),
        ("2e1 a 5 b/3", Blend(prefixes=("a", "b/3"), weights=(20.0, 5.0))),
    ],
)
def test_a_data_path_is_prefixes_or_weights_and_prefixes(words: str, expected: Blend | None) -> None:
    assert parse_blend(words.split()) == expected


@pytest.mark.parametrize(
    "line, message",
    [
        ("--data-path a --mock-data", "takes the place of a corpus, and --data-path names one"),
        ("--train-data-path a --split 1,1,1", "divides --data-path, and --train-data-path give the parts"),
        ("--valid-data-path a", "there is nothing to train on: --valid-data-path give the other parts"),
        ("", "there is nothing to train on"),
    ],
)
def test_data_comes_from_one_place(line: str, message: str, refused: Refused) -> None:
    assert message in refused(line, without="--mock-data")


def test_parts_of_the_data_are_given_once(refused: Refused) -> None:
    text = refused("--train-data-path a --data-path b", without="--mock-data")
    assert "is divided by --split, and --train-data-path give the parts" in text


@pytest.mark.parametrize("word", ["", "  "])
def test_a_text_that_is_empty_is_refused_whichever_option_it_is_of(word: str) -> None:
    """The current folder would be saved in, where `--save "$FOLDER"` met a variable that is not set."""
    texts = [option for option in all_options("gpt") if option.kind == "text" and not option.choices]
    assert {"--save", "--pipeline-model-parallel-layout", "--tensorboard-dir", "--log-json", "--data-path"} <= {
        option.name for option in texts
    }
    for option in texts:
        for arguments in ([*command_line(), option.name, word], [*command_line(), f"{option.name}={word}"]):
            with pytest.raises(ConfigError, match="is empty") as refusal:
                parse_arguments(arguments, check_files=False)
            rule = f'{option.name} "": is empty, as a shell variable that is not set is'
            assert rule in str(refusal.value)
            assert f"Works: {option.name} with a value; or leave it out" in str(refusal.value)


def test_an_empty_prefix_among_others_is_refused() -> None:
    arguments = [*command_line(without="--mock-data"), "--data-path", "0.5", "a", "0.5", ""]
    with pytest.raises(ConfigError, match=r'--data-path 0.5 a 0.5 "": is empty'):
        parse_arguments(arguments, check_files=False)


def test_two_lengths_beside_a_batch_that_grows_are_one_problem(refused: Refused) -> None:
    text = refused("--rampup-batch-size 2 2 36 --train-samples 36")
    assert "--train-iters 100 and --train-samples 36 both give the length of the run" in text
    assert "Works: --train-samples, in which --rampup-batch-size counts" in text
