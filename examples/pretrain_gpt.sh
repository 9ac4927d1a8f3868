#!/usr/bin/env bash
# Pretrain a GPT of 1.3 billion parameters on one node or several. On each node, from the folder that holds data/:
#   NNODES=4 NODE_RANK=<0 … 3> MASTER_ADDR=<host of node 0> bash examples/pretrain_gpt.sh
# Made for nodes of 8 GPUs; the layout is tensor 2 × pipeline 2 × data (all the rest). Flags after the name are
# appended, and win over the same flags here: bash examples/pretrain_gpt.sh --micro-batch-size 1
# A try without a GPU, the layout over 4 processes:
#   GPUS_PER_NODE=4 CHECKPOINTS=checkpoints/try bash examples/pretrain_gpt.sh --precision fp32 --num-layers 4 \
#       --hidden-size 128 --seq-length 128 --global-batch-size 8 --train-iters 20 --lr-warmup-iters 2
set -euo pipefail

DATA_PATH=${DATA_PATH:-data/corpus_text_document}   # prefix of .bin and .idx: tools/preprocess_data.py writes them
TOKENIZER_MODEL=${TOKENIZER_MODEL:-data/tokenizer.model}
CHECKPOINTS=${CHECKPOINTS:-checkpoints/gpt-1.3b}    # on a file system that all nodes share

launch=(
    --nproc-per-node "${GPUS_PER_NODE:-8}"
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
    --shutdown-timeout 240                      # time to save after SIGTERM; torchrun kills after 30 s by default
)

model=(
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0    # 0.1 when not given, as in Megatron-LM; large corpora need none
)

# Tensor parallelism talks most: keep it inside a node. Sequence parallelism splits what it leaves whole.
layout=(--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2)

training=(
    --precision bf16 --micro-batch-size 2 --global-batch-size 512 --train-iters 50000
    --lr 2.0e-4 --min-lr 2.0e-5 --lr-warmup-iters 500 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
)

data=(
    --data-path "$DATA_PATH" --split 990,9,1
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER_MODEL"
)

output=(
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --load-if-exists --save-interval 1000
    --exit-signal-handler                       # on SIGTERM save and stop: clusters send it before they take a node
    --log-interval 10 --eval-interval 1000 --eval-iters 10
    --log-json "$CHECKPOINTS/log.jsonl" --tensorboard-dir "$CHECKPOINTS/tensorboard"
)

exec torchrun "${launch[@]}" "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
    "${model[@]}" "${layout[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
