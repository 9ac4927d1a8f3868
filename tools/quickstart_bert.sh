#!/usr/bin/env bash
# From nothing to a trained BERT on two CPU cores, as tools/quickstart.sh for a GPT. Of its corpus BERT reads the prose,
# the docstrings: it needs sentences, and code has few.
# A step whose result is there and complete is skipped. The results of a training lie in a folder named after its data
# and flags, so another QUICKSTART_ITERATIONS or another Python trains anew.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${QUICKSTART_FOLDER:-quickstart}
iterations=${QUICKSTART_ITERATIONS:-1500}
mkdir -p "$folder"
export OMP_NUM_THREADS=1 # two ranks on two cores
source tools/quickstart_steps.sh
expect $((60 + iterations * 4 / 25)) # most of it in the training

step "1/6 corpus: the docstrings of the Python standard library, as JSON lines"
python tools/make_corpus.py --output "$folder/docstrings.jsonl" --docstrings
took

step "2/6 tokenizer: WordPiece"
python tools/train_tokenizer.py --input "$folder/docstrings.jsonl" --output-prefix "$folder/wordpiece" \
    --tokenizer-type BertWordPieceLowerCase --vocab-size 2048
took

# Each sample gets its own [CLS] and [SEP]; the tokenizer's would stand round every sentence.
tokenizer=(
    --tokenizer-type BertWordPieceLowerCase --vocab-file "$folder/wordpiece-vocab.txt"
    --tokenizer-hf-no-include-special-tokens
)
step "3/6 tokens: .bin and .idx files, a sequence for each sentence"
python tools/preprocess_data.py --input "$folder/docstrings.jsonl" --output-prefix "$folder/docstrings" \
    "${tokenizer[@]}" --split-sentences --workers 2
took

# What helps so small a BERT to learn within minutes: short samples, rotary positions, large first weights, and pieces of
# words to guess in place of runs of whole words. At first it learns how frequent tokens are, and for some hundred
# iterations nothing more (loss 6.0); then what stands beside a mask. At rates of 5e-3 it never gets that far.
training=(
    --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --init-method-std 0.08 --hidden-dropout 0 --attention-dropout 0
    --masking-max-ngram 1 --no-whole-word-masking
    --data-path "$folder/docstrings_text_sentence" --split 90,10,0 "${tokenizer[@]}"
    --micro-batch-size 32 --global-batch-size 64 --train-iters "$iterations"
    --lr 2e-3 --min-lr 1e-4 --lr-warmup-fraction 0.1 --lr-decay-style linear --weight-decay 0.01 --adam-beta2 0.95
    --eval-interval "$iterations" --eval-iters 10 --log-interval $((iterations < 100 ? iterations : 100))
)
key=$({ cat "$folder/wordpiece-vocab.txt" "$folder"/docstrings_text_sentence.{bin,idx}; echo "${training[@]}"; } | cksum)
run=$folder/bert-${key%% *}
mkdir -p "$run"

step "4/6 the training, data parallel over two ranks: masked tokens, and the order of pairs"
trained=$(cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if ((trained == iterations)); then
    echo "$run/checkpoints holds iteration $trained: skipped"
else
    torchrun --nproc-per-node 2 pretrain_bert.py "${training[@]}" \
        --save "$run/checkpoints" --load "$run/checkpoints" --load-if-exists \
        --log-json "$run/log.jsonl" --tensorboard-dir "$run/tensorboard"
fi
took

step "5/6 the losses"
python tools/plot_loss.py "$run/log.jsonl" --output "$run/loss.png"
took

step "6/6 what the model puts in the place of [MASK]"
python tools/fill_mask.py --load "$run/checkpoints" \
    --text 'Return [MASK] if the object is a string.' \
    --text 'Raise [MASK] if the argument is not a [MASK].' \
    --text 'Return the [MASK] of the list. [SEP] If it is empty, return [MASK].'
took

cat <<END

Done. The loss curves are $run/loss.png; the TensorBoard log is $run/tensorboard:
  tensorboard --logdir $run/tensorboard
More masks to fill, and what the checkpoint holds:
  python tools/fill_mask.py --load $run/checkpoints --text 'The name of the [MASK] to open.'
  python tools/inspect_checkpoint.py $run/checkpoints
On machines with GPUs, examples/pretrain_bert.sh and examples/pretrain_bert_distributed.sh train large ones.
END
