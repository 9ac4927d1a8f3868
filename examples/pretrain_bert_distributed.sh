#!/usr/bin/env bash
# Pretrain a BERT of 3.9 billion parameters (Shoeybi et al., Megatron-LM, 2019) on one node or several. On each node, from
# the folder that holds data/:
#   NNODES=4 NODE_RANK=<0 … 3> MASTER_ADDR=<host of node 0> bash examples/pretrain_bert_distributed.sh
# Made for nodes of 8 GPUs: each holds one replica, tensor parallel over all of its GPUs; nodes are data parallel. Flags
# after the name are appended, and win over the same flags here:
#   bash examples/pretrain_bert_distributed.sh --micro-batch-size 4
# For a model that Hugging Face's BertModel can hold, which has its norms after each sum and the exact GELU:
#   bash examples/pretrain_bert_distributed.sh --layernorm-placement post --activation gelu
set -euo pipefail

# Prefix of .bin and .idx: tools/preprocess_data.py --split-sentences writes them; pairs of sentences need sentences.
DATA_PATH=${DATA_PATH:-data/corpus_text_sentence}
VOCAB_FILE=${VOCAB_FILE:-data/bert-vocab.txt}       # a vocab.txt with [PAD], [UNK], [CLS], [SEP] and [MASK]
CHECKPOINTS=${CHECKPOINTS:-checkpoints/bert-3.9b}   # on a file system that all nodes share

launch=(
    --nproc-per-node "${GPUS_PER_NODE:-8}"
    --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}"
    --shutdown-timeout 240                      # time to save after SIGTERM; torchrun kills after 30 s by default
)

model=(
    --num-layers 48 --hidden-size 2560 --num-attention-heads 40
    --seq-length 512 --max-position-embeddings 512
)

# Tensor parallelism talks most: keep it inside a node. Sequence parallelism splits what it leaves whole.
layout=(--tensor-model-parallel-size 8 --sequence-parallel)

training=(
    --precision bf16 --micro-batch-size 8 --global-batch-size 1024 --train-iters 2000000
    --lr 1.0e-4 --min-lr 1.0e-5 --lr-warmup-iters 10000 --lr-decay-style linear
    --weight-decay 0.01 --clip-grad 1.0
)

data=(
    --data-path "$DATA_PATH" --split 949,50,1
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$VOCAB_FILE"
)

output=(
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --load-if-exists --save-interval 1000
    --exit-signal-handler                       # on SIGTERM save and stop: clusters send it before they take a node
    --log-interval 100 --eval-interval 1000 --eval-iters 10
    --log-json "$CHECKPOINTS/log.jsonl" --tensorboard-dir "$CHECKPOINTS/tensorboard"
)

exec torchrun "${launch[@]}" "$(dirname "${BASH_SOURCE[0]}")/../pretrain_bert.py" \
    "${model[@]}" "${layout[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
