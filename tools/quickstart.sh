#!/usr/bin/env bash
# From nothing to a trained model on two CPU cores: the steps of every training, each with the command that does it.
# A step whose result is there and complete is skipped. The results of a training lie in a folder named after its data
# and flags, so another QUICKSTART_HALF (iterations of half a training) or another Python trains anew.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${QUICKSTART_FOLDER:-quickstart}
half=${QUICKSTART_HALF:-200}
mkdir -p "$folder"
# The two ranks share two cores, so each computes with one thread. torchrun would choose the same and say so in a banner;
# a single process would take all cores, and on a busy machine wait for its slowest thread at every token that it samples.
export OMP_NUM_THREADS=1
source tools/quickstart_steps.sh
expect $((60 + half * 6 / 5)) # most of it in the training

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

batch=8 length=256 evaluations=10 # --global-batch-size, --seq-length, --eval-iters
data=(--data-path "$folder/corpus_text_document" --split 95,5,0)
training=(
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512
    --seq-length "$length" --max-position-embeddings "$length"
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --hidden-dropout 0 --attention-dropout 0
    "${data[@]}" --tokenizer-type SentencePieceTokenizer --tokenizer-model "$folder/tokenizer.model"
    --micro-batch-size 4 --global-batch-size "$batch" --train-iters $((2 * half))
    --lr 4e-3 --min-lr 1e-4 --lr-warmup-fraction 0.08 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.95
    --eval-interval "$half" --eval-iters "$evaluations" --log-interval $((half < 20 ? half : 20))
)
key=$({ cat "$folder/tokenizer.model" "$folder"/corpus_text_document.{bin,idx}; echo "${training[@]}"; } | cksum)
run=$folder/run-${key%% *}
mkdir -p "$run"
output=(
    --save "$run/checkpoints" --load "$run/checkpoints" --load-if-exists
    --log-json "$run/log.jsonl" --tensorboard-dir "$run/tensorboard"
)
trained() { cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0; }

step "4/7 the first half of the training, tensor parallel over two ranks"
if (($(trained) >= half)); then
    echo "$run/checkpoints holds iteration $(trained): skipped"
else
    torchrun --nproc-per-node 2 pretrain_gpt.py "${training[@]}" "${output[@]}" \
        --tensor-model-parallel-size 2 --exit-interval "$half"
fi
took

step "5/7 the second half, from its checkpoint, as two pipeline stages"
if (($(trained) == 2 * half)); then
    echo "$run/checkpoints holds iteration $(trained): skipped"
else
    torchrun --nproc-per-node 2 pretrain_gpt.py "${training[@]}" "${output[@]}" --pipeline-model-parallel-size 2
fi
took

step "6/7 a sample of the trained model"
if [[ ! -e $run/sample.txt ]]; then
    python tools/generate_text.py --load "$run/checkpoints" --prompt $'import os\n\n\nclass ' \
        --num-tokens 250 --temperature 0.9 --top-p 0.95 >"$run/sample.part"
    mv "$run/sample.part" "$run/sample.txt"
fi
cat "$run/sample.txt"
took

step "7/7 the loss: has the model learned more than pairs of tokens?"
# Asked each time. Status 1 is the answer no, which this script ends with once the picture is drawn; another is an error.
answer=0
python tools/bigram_entropy.py "${data[@]}" --log-json "$run/log.jsonl" --output "$run/entropy.json" || answer=$?
if ((answer > 1)); then exit "$answer"; fi
samples=$((evaluations * batch))
echo "that loss is the mean over $((samples * length)) tokens ($samples samples of $length), the entropy over all of the part"
python tools/plot_loss.py "$run/log.jsonl" --output "$run/loss.png" --lines-from "$run/entropy.json"
took

cat <<END

Done. The loss curve is $run/loss.png; the TensorBoard log is $run/tensorboard:
  tensorboard --logdir $run/tensorboard
More text from the model, its perplexity on a text, what its checkpoint holds, and a model of Hugging Face from it:
  python tools/generate_text.py --load $run/checkpoints --prompt 'def main():' --num-tokens 100 --temperature 0.8
  python tools/evaluate.py --load $run/checkpoints --text README.md
  python tools/inspect_checkpoint.py $run/checkpoints
  python tools/convert_checkpoint.py --from native --to hf $run/checkpoints $run/hf
On a machine with GPUs, this trains GPT-3 XL's shape on the same data (examples/pretrain_gpt.sh has the rest):
  torchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \\
      --seq-length 2048 --max-position-embeddings 2048 --tensor-model-parallel-size 2 --sequence-parallel \\
      --micro-batch-size 4 --global-batch-size 256 --train-iters 10000 --lr 2e-4 --lr-decay-style cosine \\
      --hidden-dropout 0 --attention-dropout 0 --data-path $folder/corpus_text_document --split 95,5,0 \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model $folder/tokenizer.model --save checkpoints

END
exit "$answer"
