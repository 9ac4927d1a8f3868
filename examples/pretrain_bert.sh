#!/usr/bin/env bash
# Pretrain a BERT of 336 million parameters (BERT-large) on one GPU, or data parallel on all of a machine:
#   GPUS_PER_NODE=8 bash examples/pretrain_bert.sh
# Flags after the name are appended, and win over the same flags here:
#   bash examples/pretrain_bert.sh --micro-batch-size 4
# A try without a GPU:
#   CHECKPOINTS=checkpoints/try bash examples/pretrain_bert.sh --precision fp32 --num-layers 2 --hidden-size 128 \
#       --num-attention-heads 2 --seq-length 128 --global-batch-size 16 --train-iters 20 --log-interval 5
# For a model that Hugging Face's BertModel can hold, which has its norms after each sum and the exact GELU:
#   bash examples/pretrain_bert.sh --layernorm-placement post --activation gelu
set -euo pipefail

# Prefix of .bin and .idx: tools/preprocess_data.py --split-sentences writes them; pairs of sentences need sentences.
DATA_PATH=${DATA_PATH:-data/corpus_text_sentence}
VOCAB_FILE=${VOCAB_FILE:-data/bert-vocab.txt}       # a vocab.txt with [PAD], [UNK], [CLS], [SEP] and [MASK]
CHECKPOINTS=${CHECKPOINTS:-checkpoints/bert-large}

launch=(
    --nproc-per-node "${GPUS_PER_NODE:-1}"
    --master-addr localhost --master-port "${MASTER_PORT:-29500}"
    --shutdown-timeout 240                      # time to save after SIGTERM; torchrun kills after 30 s by default
)

model=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 512 --max-position-embeddings 512
)

training=(
    --precision bf16 --micro-batch-size 8 --global-batch-size 256 --train-iters 1000000
    --lr 1.0e-4 --min-lr 1.0e-5 --lr-warmup-fraction 0.01 --lr-decay-style linear
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
    "${model[@]}" "${training[@]}" "${data[@]}" "${output[@]}" "$@"
