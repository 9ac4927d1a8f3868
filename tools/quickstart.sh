#!/usr/bin/env bash
# From nothing to a trained model on two CPU cores: the steps of every training, each with the command that does it.
# A step whose result is there and complete is skipped; remove the folder to start again.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${QUICKSTART_FOLDER:-quickstart}
half=${QUICKSTART_HALF:-300}
mkdir -p "$folder"

step() { printf '\n== %s\n' "$*"; SECONDS=0; }
took() { printf '   (%d s)\n' "$SECONDS"; }

step "1/7 corpus: the Python standard library, as JSON lines"
python tools/make_corpus.py --output "$folder/corpus.jsonl" --max-megabytes 32
took

step "2/7 tokenizer: SentencePiece BPE, lossless"
python tools/train_tokenizer.py --input "$folder/corpus.jsonl" --output-prefix "$folder/tokenizer" --vocab-size 512
took

step "3/7 tokens: .bin and .idx files"
python tools/preprocess_data.py --input "$folder/corpus.jsonl" --output-prefix "$folder/corpus" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$folder/tokenizer.model" --append-eod --workers 2
took

model=(
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512
    --seq-length 256 --max-position-embeddings 256
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0
)
training=(
    --data-path "$folder/corpus_text_document" --split 95,5,0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$folder/tokenizer.model"
    --micro-batch-size 4 --global-batch-size 8 --train-iters $((2 * half))
    --lr 4e-3 --min-lr 1e-4 --lr-warmup-fraction 0.08 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --eval-interval $half --eval-iters 10 --log-interval 20
    --save "$folder/checkpoints" --load "$folder/checkpoints" --load-if-exists
    --log-json "$folder/log.jsonl" --tensorboard-dir "$folder/tensorboard"
)

step "4/7 the first half of the training, tensor parallel over two ranks"
if [[ -e "$folder/checkpoints/latest_checkpointed_iteration.txt" ]]; then
    echo "$folder/checkpoints is there: skipped"
else
    torchrun --nproc-per-node 2 pretrain_gpt.py "${model[@]}" "${training[@]}" \
        --tensor-model-parallel-size 2 --exit-interval "$half"
fi
took

step "5/7 the second half, from its checkpoint, as two pipeline stages"
if [[ $(cat "$folder/checkpoints/latest_checkpointed_iteration.txt") == $((2 * half)) ]]; then
    echo "iteration $((2 * half)) is there: skipped"
else
    torchrun --nproc-per-node 2 pretrain_gpt.py "${model[@]}" "${training[@]}" --pipeline-model-parallel-size 2
fi
took

step "6/7 the loss, beside what pairs of tokens alone could reach"
python tools/bigram_entropy.py --data-path "$folder/corpus_text_document" --split 95,5,0 --part valid \
    --log-json "$folder/log.jsonl" | tee "$folder/bigram.txt"
bigram=$(sed -nE 's/.*: ([0-9.]+) nats.*/\1/p' "$folder/bigram.txt")
python tools/plot_loss.py "$folder/log.jsonl" --output "$folder/loss.png" --line "bigram entropy=$bigram"
took

step "7/7 a sample of the trained model"
python tools/generate_text.py --load "$folder/checkpoints" --prompt $'import os\n\n\nclass ' \
    --num-tokens 250 --temperature 0.9 --top-p 0.95 \
    | tee "$folder/sample.txt"
took

cat <<END

Done. The loss curve is $folder/loss.png; the TensorBoard log is $folder/tensorboard:
  tensorboard --logdir $folder/tensorboard
On a machine with GPUs, this trains GPT-3 XL's shape on the same data (examples/pretrain_gpt.sh has the rest):
  torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
      --seq-length 2048 --max-position-embeddings 2048 --tensor-model-parallel-size 2 --sequence-parallel \\
      --micro-batch-size 4 --global-batch-size 256 --train-iters 10000 --lr 2e-4 --lr-decay-style cosine \\
      --hidden-dropout 0 --attention-dropout 0 --data-path $folder/corpus_text_document --split 95,5,0 \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model $folder/tokenizer.model --save checkpoints
END
