"""Every flag of Megatron-LM, past and present, that is not an option here: already so, or refused because ...

The flags that are options here are fields of the sections; this table holds the rest, as data. A name may end
in `*` (a whole family), or carry values, `--flag=a|b`: these ask for nothing that is not so here already.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.conditions import (
    Condition,
    checkpoint_must_exist,
    flash_kernel_fits,
    gradients_are_wide,
    nothing_is_compiled,
    positions_are_rotary,
)
from megatron.config.problems import Problem

if TYPE_CHECKING:
    from megatron.config.megatron_config import MegatronConfig

# What this version does anyway: accepted, and said in one line at the start of a run.
_ALREADY_SO: tuple[tuple[str, str], ...] = (
    ("there is one implementation of the model", "--use-mcore-models --transformer-impl=local"),
    (
        "there is no fused kernel of explicit attention weights, of bias and dropout, nor of rotary positions",
        "--no-masked-softmax-fusion --no-scaled-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion",
    ),
    ("there is no second, persistent kernel of a norm", "--no-persist-layer-norm"),
    ("a compiler fuses operations with --torch-compile only", "--disable-jit-fuser"),
    ("attention picks its kernel itself", "--attention-backend=auto"),
    ("main weights keep all bits of fp32", "--main-params-dtype=fp32"),
    (
        "muon takes each matrix whole on every rank, and all but matrices are updated as by adam",
        "--muon-tp-mode=duplicated --muon-scalar-optimizer=adam",
    ),
    ("softmax of attention is taken in fp32 or wider", "--attention-softmax-in-fp32"),
    (
        "gradients are accumulated and reduced in fp32 or wider",
        "--accumulate-allreduce-grads-in-fp32 --fp32-allreduce",
    ),
    (
        "gradients lie in contiguous buffers, reduced once a step",
        "--DDP-impl=local --use-contiguous-buffers-in-ddp --use-contiguous-buffers-in-local-ddp",
    ),
    ("initial weights do not depend on the device or the layout", "--use-cpu-initialization"),
    (
        "attention masks are never built as dense tensors by the loader",
        "--no-create-attention-mask-in-dataloader",
    ),
    ("datasets are .bin/.idx files", "--data-impl=mmap|infer"),
    ("stages send whole activations", "--no-scatter-gather-tensors-in-pipeline"),
    ("the launcher says the local rank", "--local-rank=*"),
    ("there is no such logger", "--no-one-logger"),
    ("there is no multi-storage client", "--disable-msc"),
    ("what writes in the background stays as long as the run", "--use-persistent-ckpt-worker"),
    ("there is one way to write in the background", "--async-strategy=nvrx|mcore"),
    ("all ranks share out the writing of a checkpoint", "--ckpt-fully-parallel-save"),
    (
        "batch size and learning rate are always written",
        "--log-batch-size-to-tensorboard --log-learning-rate-to-tensorboard",
    ),
    ("there is no re-run machine", "--rerun-mode=disabled"),
    (
        "checkpoints hold no state of random generators: masks and orders are functions of seed and position",
        "--no-save-rng --no-load-rng",
    ),
    ("--load with nothing to load is an error", "--exit-on-missing-checkpoint"),
    ("rotary positions come without learned ones", "--no-position-embedding"),
    (
        "attention runs in a flash kernel where the device has one",
        "--use-flash-attn --attention-backend=flash",
    ),
    ("a missing or unexpected tensor is always an error", "--dist-ckpt-strictness=raise_all"),
    ("what all ranks of a replica group hold, one of them writes", "--no-ckpt-fully-parallel-save"),
    (
        "the feature that they belong to is off",
        "--expert-model-parallel-size=1 --expert-tensor-parallel-size=1 "
        "--num-distributed-optimizer-instances=1 --cpu-offloading-num-layers=0 "
        "--empty-unused-memory-level=0 --vocab-extra-ids=0 --sample-rate=1|1.0 --cp-comm-type=p2p "
        "--wgrad-deferral-limit=0 --error-injection-rate=0 --manual-gc-interval=0 --moe-layer-freq=1 "
        "--softmax-type=vanilla --virtual-pipeline-model-parallel-size=1 "
        "--checkpoint-num-layers=1 --glu-linear-offset=0|0.0 --rotary-scaling-factor=1|1.0 --rope-type=rope",
    ),
)

# What the configuration must agree with for these.
_CONDITIONS: Mapping[str, Condition] = {
    "--exit-on-missing-checkpoint": checkpoint_must_exist,
    "--no-position-embedding": positions_are_rotary,
    "--accumulate-allreduce-grads-in-fp32": gradients_are_wide,
    "--fp32-allreduce": gradients_are_wide,
    "--use-flash-attn": flash_kernel_fits,
    "--attention-backend=flash": flash_kernel_fits,
    "--disable-jit-fuser": nothing_is_compiled,
}

_LATER = "is not available in this version"
_LATER_ALL = "are not available in this version"
_OUTSIDE = "outside what this project trains (GPT and BERT)"
_FORK = "is not a Megatron-LM flag, but one of a fork"
_NO_NUMBER = "changes no number, and this version has no such switch"

# (reason, what to do instead, names)
_REFUSED: tuple[tuple[str, str, str], ...] = (
    # parallelism
    (
        f"this form of the distributed optimizer {_LATER}",
        "--use-distributed-optimizer, and --overlap-param-gather with it",
        "--overlap-param-gather-with-optimizer-step --no-align-param-gather "
        "--overlapped-distributed-optimizer --num-distributed-optimizer-instances "
        "--no-use-layer-wise-param-layout --delay-param-gather "
        "--distrib-optim-fully-reshardable-mem-efficient",
    ),
    (
        f"this way to reduce gradients {_LATER}",
        "leave it out; --overlap-grad-reduce and --ddp-bucket-size are available",
        "--ddp-* --no-align-grad-reduce --disable-align-grad-reduce "
        "--delay-grad-reduce --no-delay-grad-reduce --no-gradient-reduce-div-fusion "
        "--suggested-communication-unit-size",
    ),
    (
        f"sharding parameters over data-parallel ranks (FSDP) {_LATER}",
        "--tensor-model-parallel-size and --pipeline-model-parallel-size divide the model",
        "--use-megatron-fsdp --use-custom-fsdp --use-torch-fsdp2 --megatron-fsdp-* --fsdp-* --nvfsdp "
        "--data-parallel-sharding-strategy --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp "
        "--torch-fsdp2-no-reshard-after-forward --create-all-gather-group --keep-fp8-transpose-cache "
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load --init-model-with-meta-device",
    ),
    (
        f"context parallelism {_LATER}",
        "leave it out; --sequence-parallel and a larger --tensor-model-parallel-size make room for long sequences",
        "--cp-comm-type --hierarchical-context-parallel-sizes --hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
    ),
    (
        "tensor-parallel communication always overlaps with the weight gradient",
        "leave it out: it changes no number",
        "--no-async-tensor-model-parallel-allreduce",
    ),
    (
        f"this way to overlap communication {_LATER}",
        "leave it out",
        "--tp-comm-* --no-tp-comm-* --disable-tp-comm-* --no-overlap-p2p-communication "
        "--overlap-p2p-communication-warmup-flush --delay-wgrad-compute --defer-embedding-wgrad-compute "
        "--wgrad-deferral-limit --use-ring-exchange-p2p --symmetric-ar-type --high-priority-stream-groups "
        "--high-priority-a2a-comm-stream",
    ),
    (
        f"tuning the communication library by flag {_LATER}",
        "leave it out; the library's own environment variables (NCCL_...) tune it",
        "--nccl-communicator-config-path --use-sharp --sharp-enabled-group --use-nccl-ub "
        "--disable-symmetric-registration --pipeline-model-parallel-comm-backend "
        "--disable-gloo-process-groups --distributed-timeout-seconds-after-init --flight-recorder-* "
        "--no-flight-recorder-* --disable-flight-recorder-*",
    ),
    (
        "layers that the stages do not divide are spread by cost already, embedding and output layer counted",
        "leave it out; --pipeline-model-parallel-layout spells the stages out",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --standalone-embedding-stage",
    ),
    (
        f"a run without its processes {_LATER}",
        "--print-parallel-groups --world-size N prints the layout",
        "--fake-process-group --lazy-mpu-init",
    ),
    (
        f"models with an encoder and a decoder are {_OUTSIDE}",
        "--num-layers, --seq-length and --pipeline-model-parallel-size",
        "--pipeline-model-parallel-split-rank --decoder-num-layers --encoder-num-layers "
        "--decoder-seq-length --transformer-pipeline-model-parallel-size",
    ),
    (
        "it follows from other flags how many model chunks a stage has",
        "--num-virtual-stages-per-pipeline-rank N",
        "--virtual-pipeline-model-parallel-size",
    ),
    (
        f"splitting weights by generalized tensor parallelism {_LATER}",
        "--tensor-model-parallel-size",
        "--tensor-parallel-num-weight-shards --gtp-*",
    ),
    (
        "gradients always lie in contiguous buffers",
        "leave it out",
        "--no-contiguous-buffers-in-local-ddp",
    ),
    # memory
    (
        "Megatron-LM has renamed it",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--checkpoint-activations --activations-checkpoint-* --checkpoint-num-layers",
    ),
    (
        "Megatron-LM has renamed it",
        "--distribute-saved-activations",
        "--distribute-checkpointed-activations",
    ),
    (
        f"offloading activations {_LATER}",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 keeps few of them",
        "--cpu-offloading-* --fine-grained-* --offload-modules --min-offloaded-tensor-size "
        "--delay-offload-until-cuda-graph --delta-offload-bytes-across-pp-ranks --activation-offload-fraction",
    ),
    (
        f"computing an MLP in parts {_LATER}",
        "--recompute-granularity selective --recompute-modules mlp",
        "--mlp-chunks-for-prefill --mlp-chunks-for-training",
    ),
    (
        f"keeping optimizer state elsewhere {_LATER}",
        "leave it out; --use-precision-aware-optimizer makes it smaller",
        "--optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload "
        "--overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --optimizer-cuda-graph",
    ),
    (
        "main weights keep all bits of fp32",
        "leave it out: --use-precision-aware-optimizer keeps them in two bytes beside the model's bf16",
        "--main-params-dtype",
    ),
    (
        "memory is managed by torch's allocator",
        "leave it out; PYTORCH_CUDA_ALLOC_CONF tunes it",
        "--empty-unused-memory-level",
    ),
    # precision
    (
        f"training in 8 or 4 bits {_LATER}",
        "--bf16",
        "--fp8-* --no-fp8-wgrad --disable-fp8-wgrad --fp4-* --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 --te-precision-config-file "
        "--reuse-grad-buf-for-mxfp8-param-ag --kitchen-* --use-kitchen-attention",
    ),
    (
        f"this choice of precision {_LATER}",
        "leave it out; the loss and its softmax are taken in fp32",
        "--fp16-lm-cross-entropy --output-logit-dtype --fp32-embedding "
        "--fp32-layernorm --fp32-tokentypes --disable-bf16-reduced-precision-matmul",
    ),
    # implementations
    ("there is one implementation of the model", "leave it out", "--use-legacy-models"),
    (
        "Transformer Engine and Apex are not used: the same model is built from this project's own layers",
        "leave it out",
        "--transformer-impl --use-te-activation-func --use-transformer-engine-op-fuser --te-rng-tracker",
    ),
    (
        "there is one implementation of data parallelism, this project's own",
        "leave it out",
        "--DDP-impl",
    ),
    (
        f"choosing the attention kernel {_LATER}; torch's scaled_dot_product_attention chooses",
        "leave it out",
        "--attention-backend --flash-attention-version --flash-decode",
    ),
    (
        f"this fused kernel {_LATER}",
        "leave it out: the same function runs unfused",
        "--fused-residual-rmsnorm "
        "--use-fused-weighted-squared-relu --masked-softmax-fusion --scaled-masked-softmax-fusion "
        "--scaled-upper-triang-masked-softmax-fusion --bias-gelu-fusion --bias-dropout-fusion",
    ),
    (
        f"CUDA graphs {_LATER_ALL}",
        "--torch-compile",
        "--enable-cuda-graph --external-cuda-graph --cuda-graph-* --decode-only-cuda-graphs",
    ),
    (
        f"bitwise equality of GPU runs {_LATER}; CPU runs are deterministic",
        "leave it out",
        "--deterministic-mode --batch-invariant-*",
    ),
    (
        _NO_NUMBER,
        "leave it out",
        "--manual-gc --manual-gc-interval --no-manual-gc-eval --disable-manual-gc-eval "
        "--train-sync-interval --no-clone-scatter-output-in-embedding "
        "--disable-clone-scatter-output-in-embedding --no-barrier-with-level-1-timing "
        "--onnx-safe",
    ),
    # the model
    (
        f"mixture of experts {_LATER}",
        "leave it out: every layer is dense",
        "--num-experts --moe-* --expert-* --overlap-moe-expert-parallel-comm "
        "--overlap-dispatch-backward-with-experts-wgrad --ep-overlap-* --use-grouped-gemm-for-dense-mlp "
        "--use-grouped-gemm-for-shared-expert --save-tokens-per-expert-interval --decoupled-expert-*",
    ),
    (
        f"multi-head latent attention {_LATER}",
        "--group-query-attention",
        "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim "
        "--v-head-dim --rotary-scaling-factor --mscale --mscale-all-dim --cache-mla-latents "
        "--mla-down-proj-fusion",
    ),
    (
        f"this form of attention {_LATER}",
        "leave it out; --window-size and --group-query-attention are available",
        "--softmax-type --attention-output-gate --qk-l2-norm --qk-clip --qk-clip-* "
        "--window-attn-skip-freq --experimental-attention-variant --dsa-* --no-dsa-* --disable-dsa-* "
        "--linear-* --no-rope-freq --mrope-section",
    ),
    (
        f"these positions {_LATER_ALL}",
        "--position-embedding-type rope, --use-rope-scaling or --rotary-seq-len-interpolation-factor",
        "--rope-type --yarn-* --no-yarn-* --relative-attention-*",
    ),
    (
        f"this form of the layer {_LATER}",
        "leave it out",
        "--apply-layernorm-1p --glu-linear-offset "
        "--activation-func-clamp-value --mtp-* --enable-mhc-connections --mhc-* --use-mup --mup-* "
        "--heterogeneous-layers-* --num-unique-layers --param-sharing-style",
    ),
    (f"this activation {_LATER}", "--swiglu, --squared-relu or --activation gelu", "--quick-geglu"),
    (
        "the layers of the model are written in megatron/model",
        "a model function of your own, given to pretrain(...)",
        "--spec --enable-experimental",
    ),
    (
        f"this initialisation {_LATER}",
        "--init-method-std and --embedding-init-method-std",
        "--init-method-xavier-uniform --no-initialization --data-parallel-random-init",
    ),
    (
        f"state-space and hybrid models are {_OUTSIDE}",
        "leave it out",
        "--mamba-* --gdp-* --disable-mamba-mem-eff-path --is-hybrid-model --hybrid-*",
    ),
    # the optimizer and its schedules
    (
        f"this part of muon {_LATER}",
        "leave it out: each rank orthogonalizes whole matrices, the rest is updated as by adam",
        "--muon-*",
    ),
    (
        f"this optimizer {_LATER}",
        "--optimizer adam, sgd or muon",
        "--lion-* --cpu-optimizer --cpu-torch-adam --onebit-*",
    ),
    (
        f"a learning rate or weight decay of their own for some parameters {_LATER}",
        "leave it out: biases and norms have no weight decay",
        "--decoupled-lr --decoupled-min-lr --apply-wd-to-qk-layernorm --no-weight-decay-cond-type "
        "--freeze-all-layers --head-lr-mult --dump-param-to-param-group-map",
    ),
    (
        f"this batch size schedule {_LATER}",
        "--rampup-batch-size START INCREMENT SAMPLES with --global-batch-size",
        "--step-batch-size-schedule --decrease-batch-size-if-needed",
    ),
    (
        f"skipping iterations or changing phases {_LATER}",
        "leave it out",
        "--iterations-to-skip --phase-transition-iterations",
    ),
    # checkpoints
    (
        "checkpoints have one format of this project (safetensors and JSON), which any layout reads",
        "leave it out",
        "--ckpt-format --use-dist-ckpt --dist-ckpt-* --ckpt-* --no-ckpt-* --disable-ckpt-* "
        "--auto-detect-ckpt-format --verify-integrity",
    ),
    (
        "a thread of each rank writes in the background, at the priority of the rank",
        "--async-save alone",
        "--async-ckpt-* --async-strategy",
    ),
    (
        f"checkpoints of another kind, in memory or on local disks, {_LATER_ALL}",
        "--save DIR, with --async-save for one that training hardly waits for",
        "--non-persistent-* --replication --replication-*",
    ),
    (
        "a checkpoint belongs to no layout: any number of ranks reads it, split in any way",
        "leave it out; --tensor-model-parallel-size, --pipeline-model-parallel-size and the flags of virtual stages "
        "give the layout",
        "--use-mp-args-from-checkpoint-args",
    ),
    (
        f"this way to load {_LATER}",
        "--load DIR, with --ckpt-step N for an earlier iteration or --finetune for the weights alone",
        "--pretrained-checkpoint --override-ckpt-iteration --load-main-params-from-ckpt",
    ),
    (
        f"dumps of parameters and gradients {_LATER_ALL}",
        "--log-params-norm",
        "--save-params-interval --save-wgrads-interval --save-dgrads-interval --save-activations-interval",
    ),
    # data and tokenizers
    (
        f"this way to name or read corpora {_LATER}",
        "--data-path, or --train-data-path, --valid-data-path and --test-data-path",
        "--per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--object-storage-cache-path --enable-msc --data-impl --dataloader-inter-document-masking "
        "--allow-ambiguous-pad-tokens --sample-rate",
    ),
    (
        "text is tokenized once, beforehand, into .bin/.idx files",
        "tools/preprocess_data.py, then --data-path PREFIX",
        "--train-data --valid-data --test-data --input-data-sizes-file --delim --loose-json --text-key "
        "--presplit-sentences --lazy-loader --use-tfrecords --use-npy-data-loader --resume-dataloader "
        "--shuffle",
    ),
    (
        f"this tokenizer option {_LATER}",
        "--tokenizer-type with --tokenizer-model, or --vocab-file and --merge-file",
        "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces --legacy-tokenizer "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-no-use-fast --trust-remote-code "
        "--chat-template --use-gigatoken --vocab-extra-ids --tokenizer-model-type "
        "--cache-dir",
    ),
    (
        "padding of the vocabulary takes no part in the loss, so it need not be turned off",
        "--make-vocab-size-divisible-by 1, or --padded-vocab-size N",
        "--no-pad-vocab-size --disable-pad-vocab-size",
    ),
    (
        f"this form of evaluation {_LATER}",
        "--eval-interval and --eval-iters",
        "--eval-global-batch-size --eval-micro-batch-size --start-eval-at-iter "
        "--test-mode --eval-batch-size "
        "--eval-seq-length --overlapping-eval",
    ),
    # reports and faults
    (
        f"this report {_LATER}",
        "leave it out; --log-json, --tensorboard-dir and --timing-log-level report",
        "--log-progress --log-memory-to-tensorboard --log-memory-interval --log-device-memory-used "
        "--log-energy --log-max-attention-logit --logging-level --config-logger-dir --wandb-* --otel-* "
        "--one-logger-* --app-tag-* --no-log-learnig-rate-to-tensorboard",
    ),
    (
        f"profiling by flag {_LATER}",
        "--timing-log-level 2",
        "--profile --profile-* --use-pytorch-profiler --pytorch-profiler-* --record-shapes "
        "--record-memory-history --memory-snapshot-path --nvtx-ranges",
    ),
    (
        f"watching over faults by flag {_LATER}",
        "--exit-signal-handler, and a launcher that starts the run again",
        "--rerun-mode --error-injection-* --check-for-spiky-loss --check-for-large-grads "
        "--check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval "
        "--result-rejected-tracker-filename --log-straggler --straggler-* --disable-straggler-on-startup "
        "--run-workload-inspector-server --inprocess-* --enable-ft-package --calc-ft-timeouts "
        "--ft-num-warmup-iters --fault-injector-* --adlr-autoresume --adlr-autoresume-interval "
        "--exit-signal-handler-for-dataloader --exit-signal-handler-for-training",
    ),
    (
        "is spelled --config here, for a YAML file whose keys are names of flags",
        "--config FILE",
        "--yaml-cfg",
    ),
    # other programs
    (
        "how many tokens are masked follows from the length of a sample",
        "--mask-prob of pretrain_bert.py",
        "--max-preds-per-seq --eval-max-preds-per-seq",
    ),
    (
        f"this use of BERT {_LATER}",
        "leave it out; pretrain_bert.py trains one",
        "--bert-* --output-bert-embeddings --pretrained-bert",
    ),
    (
        f"reinforcement learning and fine-tuning on conversations are {_OUTSIDE}",
        "leave it out",
        "--perform-rl-step --rl-* --grpo-* --langrl-env-config --refit-method --sft --sft-*",
    ),
    (
        "this project trains models, and serves none",
        "leave it out; tools/generate_text.py samples from a checkpoint",
        "--inference-* --max-tokens-to-oom --use-legacy-static-engine --enable-chunked-prefill "
        "--num-speculative-tokens --use-same-sampling-seed-across-dp-ranks --nccl-all-reduce-for-prefill",
    ),
    (f"distillation is {_OUTSIDE}", "leave it out", "--logits-*"),
    (
        f"retrieval is {_OUTSIDE}",
        "leave it out",
        "--ict-* --biencoder-* --retriever-* --retro-* --titles-data-path --query-in-block-prob "
        "--use-one-sent-docs --evidence-data-path --block-data-path --embedding-path --indexer-*",
    ),
    (
        f"vision is {_OUTSIDE}",
        "leave it out",
        "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction "
        "--data-per-class-fraction --no-data-sharding --vision-* --swin-* --mask-type --mask-factor "
        "--iter-per-epoch --dino-*",
    ),
    # forks, each with the flag that says the same here
    (_FORK, "--num-query-groups with --group-query-attention", "--num-key-value-heads"),
    (
        _FORK,
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER",
        "--tokenizer-name-or-path --tokenizer-file --tokenizer-padding-side --special-tokens-file",
    ),
    (_FORK, "--rotary-base", "--rotary-position-embeddings-theta"),
    (_FORK, "--recompute-granularity, with --recompute-modules or --recompute-method", "--recompute-*"),
    (_FORK, "--rotary-percent", "--partial-rotary-factor"),
    (_FORK, "--normalization RMSNorm", "--use-fused-rmsnorm --no-fused-rmsnorm"),
    (_FORK, "--swiglu", "--use-fused-swiglu --glu-activation"),
    (_FORK, "--position-embedding-type rope", "--use-fused-rotary-pos-emb"),
    (_FORK, "leave it out: the tanh GELU is the default", "--gelu-tanh"),
    (
        _FORK,
        "--use-rope-scaling, or --rotary-seq-len-interpolation-factor",
        "--rope-scaling-* --beta-fast --beta-slow --low-freq-factor --high-freq-factor "
        "--original-max-position-embeddings --dynamic-factor --long-factor --short-factor --long-mscale "
        "--short-mscale --longrope-freqs-type --use-glm-rope",
    ),
    (_FORK, "--padded-vocab-size", "--pad-vocab-size-to --extra-vocab-size"),
    (_FORK, "--add-qkv-bias", "--add-qkv-bias-linear"),
    (_FORK, "--pipeline-model-parallel-size", "--pipe-parallel-size --no-pipeline-parallel"),
    (
        _FORK,
        "--pipeline-model-parallel-layout",
        "--num-layer-list --pp-partition-method --noop-layers --allow-padding-num-layers",
    ),
    (
        _FORK,
        "--torch-compile",
        "--use-torch-compile --jit-compile --use-torch-compiled-autograd --compiled-autograd-fallback-mode",
    ),
    (
        _FORK,
        "--train-samples, --lr-decay-samples and --lr-warmup-samples",
        "--train-tokens --lr-decay-tokens --lr-warmup-tokens",
    ),
    (_FORK, "--data-path", "--dataset --*-weighted-split-paths --*-weighted-split-paths-path"),
    (_FORK, "leave it out: torchrun or Slurm start the processes", "--rank --dist-url --use-mpi"),
    (
        f"{_FORK} with an engine and a parallelism of its own (DeepSpeed)",
        "leave it out; --tensor-model-parallel-size and --pipeline-model-parallel-size divide the model",
        "--deepspeed --deepspeed-* --zero-* --ds-* --universal-checkpoint --partition-activations "
        "--checkpoint-in-cpu --contigious-checkpointing --synchronize-each-layer --create-moe-param-group "
        "--gas --topk --kd --kd-* --*-teacher --load-state --reset-iteration --no-load-lr-state "
        "--no-scaled-init --log-optimizer-states-to-tensorboard --offload-continuous-buffers --ln-fp16 "
        "--embed-layernorm --disable-moe-token-dropping --use-tutel --num-microbatches-in-minibatch",
    ),
    (
        _FORK,
        "leave it out",
        "--abort-on-unmet-fused-kernel-constraints --add-dense-bias --add-output-layer-bias "
        "--add-rmsnorm-offset --ai-framework --apply-sft-dataset-separated-loss-mask-if-existed "
        "--attention-head-type --attention-mask-type --bridge-* --coc-fused-kernel --codecarbon-dir "
        "--context-parallel-algo --dim-model-base --disable-gloo-group --do-layernorm-bias-weight-decay "
        "--embedding-multiplier-scale --enable-hbmfault-repair --enable-hf2mg-convert "
        "--enable-high-availability --enable-mla-absorb --enable-mla-scale-kv-lora "
        "--enable-mla-scale-q-lora --enable-recompute-layers-per-pp-rank --enable-zb-runtime "
        "--enable-zbh1-exact-semantics --enable-zbh1-pipeline --enable-profiling --enable-dsa-indexer "
        "--experiment-* --fill-neg-inf --first-k-dense-replace --fix-router --fix-sub-seq-length "
        "--full-attention-interval --gemm-gradient-accumulation-fusion --handler-name --hccl-op-mode "
        "--hidden-dim-multiplier --index-topk --indexer-loss-coeff --init-norm-weight-in-fp32 "
        "--input-embeds-norm --input-jitter --interleave-* --kill-switch-path "
        "--kv-head-repeat-before-uly-alltoall --log-level --log-level-replica --max-padding-length "
        "--measure-activation-memory --mla-fa-without-pad --mla-mm-split --model-type-hf "
        "--multi-head-latent-attention --multiple-of --n-shared-experts --no-enable-linear-qkv "
        "--no-pre-communication-optimization --no-seq-len-plus-one-tokens --no-shared-fs "
        "--no-shared-storage --norm-init-weight --norm-topk-prob --num-zero-experts "
        "--output-layer-slice-num --output-logit-softcapping --output-multiplier-scale "
        "--overlap-ep-comm-with-split-attn --patch-tokenizer-type --post-norm --profiling-out-folder "
        "--qk-nope-head-dim --qk-rope-head-dim --query-pre-attn-scalar --rampup-save-interval "
        "--reuse-fp32-param --rmsnorm-weight-in-fp32 --routed-scaling-factor --scale-depth --scale-emb "
        "--seq-aux --shape-order --shared-expert-gate --skip-bias-add --square-alibi-mask "
        "--structured-logs --structured-logs-dir --swap-attention --swap-optimizer "
        "--sync-tp-duplicated-parameters --task --topk-group --topk-softmax-in-fp32 --tp-2d --tp-x --tp-y "
        "--train-mode --trigger-path --ulysses-degree-in-cp --use-ascend-* --use-bridge "
        "--use-cp-send-recv-overlap --use-deter-comp --use-flash-attn-* --use-fused-* --use-intra-ep "
        "--use-mc2 --use-packed-seq-params --use-quantize-comm --use-sparse-flash-attn --use-triton-gdn "
        "--valid-num-workers --variable-seq-lengths --verify-checkpoint --verify-checkpoint-model-type",
    ),
)

# Megatron-LM's GELU is the tanh form fused with the bias, and the exact one when the fusion is turned off:
# there the flag picks the function. It has no say when the activation is given in another way.
FUSION_FLAG = "--no-bias-gelu-fusion"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownFlag:
    """A Megatron-LM flag that is no option here.

    name: as in the table, maybe a family. values: those that are already so here, "" for the flag alone; None for any,
    () for none. already, reason: why some values are so, and why others are refused.
    """

    name: str
    values: tuple[str, ...] | None
    already: str = ""
    reason: str = ""
    instead: str = ""

    def already_so(self, words: list[str]) -> bool:
        """Whether the flag with these words asks for nothing but what is so."""
        if not self.already:
            return False
        return self.values is None or " ".join(words) in self.values

    def unmet(self, words: str, config: MegatronConfig) -> Iterator[Problem]:
        """What keeps a configuration from a value that is already so."""
        condition = _CONDITIONS.get("=".join([self.name, *words.split()]))
        if condition is not None:
            yield from condition(config, f"{self.name} {words}".strip())

    @property
    def is_switch(self) -> bool:
        """Whether it takes no word after it."""
        return self.values == ("",)


def known_flag(name: str) -> KnownFlag | None:
    """What is known of a flag that is no option here; name with dashes."""
    table = _table()
    if name in table:
        return table[name]
    for start, flag in _families():
        if name.startswith(start):
            return flag
    for end, flag in _endings():
        if name.endswith(end):
            return flag
    return None


def known_names() -> Iterator[str]:
    """The names of the table, families aside."""
    return (name for name in _table() if "*" not in name)


@functools.cache
def _table() -> Mapping[str, KnownFlag]:
    table: dict[str, KnownFlag] = {}
    for reason, instead, names in _REFUSED:
        for name in names.split():
            table[name] = KnownFlag(name=name, values=(), reason=reason, instead=instead)
    for already, names in _ALREADY_SO:
        for word in names.split():
            name, has_values, values = word.partition("=")
            accepted = None if values == "*" else tuple(values.split("|")) if has_values else ("",)
            before = table.get(name) or _refused_family(name)
            table[name] = KnownFlag(
                name=name,
                values=accepted if before is None or not before.already else _joined(before.values, accepted),
                already=already,
                reason=before.reason if before else "",
                instead=before.instead if before else "",
            )
    return table


def _joined(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return None if one is None or other is None else one + other


def _refused_family(name: str) -> KnownFlag | None:
    """Why other values of a flag are refused when its family is, the most narrow one."""
    found = [
        KnownFlag(name=family, values=(), reason=reason, instead=instead)
        for reason, instead, names in _REFUSED
        for family in names.split()
        if family.endswith("*") and name.startswith(family.removesuffix("*"))
    ]
    return max(found, key=lambda flag: len(flag.name), default=None)


@functools.cache
def _families() -> tuple[tuple[str, KnownFlag], ...]:
    """Beginnings of names, the longest first."""
    starts = ((name.removesuffix("*"), flag) for name, flag in _table().items() if name.endswith("*"))
    return tuple(sorted(starts, key=lambda item: -len(item[0])))


@functools.cache
def _endings() -> tuple[tuple[str, KnownFlag], ...]:
    return tuple((name[3:], flag) for name, flag in _table().items() if name.startswith("--*"))
