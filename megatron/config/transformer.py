"""The transformer: everything that decides which function the model computes and which parameters it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron.config.options import LONGEST_SEQUENCE, MOST_HEADS, MOST_LAYERS, flag
from megatron.config.problems import Problem, divisors, multiples, near

PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
Normalization = Literal["LayerNorm", "RMSNorm"]
CrossEntropyFusion = Literal["native", "linear"]
LayerNormPlacement = Literal["pre", "post"]
Activation = Literal["gelu_tanh", "gelu", "swiglu", "squared_relu"]

RESIDUAL_AFTER_NORM = "--apply-residual-connection-post-layernorm"
RECOMPUTABLE = ("core_attn", "layernorm", "mlp")
# Megatron-LM's other parts of a layer, and what they are parts of.
NOT_HERE = {
    "moe": "mixtures of experts",
    "moe_act": "mixtures of experts",
    "shared_experts": "mixtures of experts",
    "mla_up_proj": "multi-head latent attention",
}
# What --recompute-granularity full needs, and of each the choice that saves most.
FULL_RECOMPUTATION = {"--recompute-method": "uniform", "--recompute-num-layers": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeUnit:
    """A run of layers.

    recomputed: only the hidden states that enter it are kept for the backward.
    """

    layers: range
    recomputed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Sizes and choices of the model. Derived sizes are properties."""

    num_layers: int = field(metadata=flag("Transformer layers.", affects="tensors", at_least=1, at_most=MOST_LAYERS))
    hidden_size: int = field(
        metadata=flag("Width of the residual stream.", affects="tensors", at_least=1, at_most=1_000_000)
    )
    num_attention_heads: int = field(
        metadata=flag("Query heads of each layer.", affects="model", at_least=1, at_most=MOST_HEADS)
    )
    ffn_hidden_size: int | None = field(
        default=None,
        metadata=flag(
            "Width inside the MLP; 4 x hidden when not given, 8/3 x hidden rounded down to 64 with SwiGLU.",
            affects="tensors",
            meaning="ffn_size",
            aliases=("--intermediate-size",),
            at_least=1,
            at_most=10_000_000,
        ),
    )
    kv_channels: int | None = field(
        default=None,
        metadata=flag(
            "Width of a head; hidden / heads when not given.",
            affects="model",
            meaning="head_dim",
            at_least=1,
            at_most=1_000_000,
        ),
    )
    group_query_attention: bool = field(
        default=False,
        metadata=flag("Share keys and values among groups of query heads.", affects="model", meaning="query_groups"),
    )
    num_query_groups: int | None = field(
        default=None,
        metadata=flag(
            "Key/value heads with --group-query-attention (there, 1 when not given).",
            affects="model",
            meaning="query_groups",
            at_least=1,
            at_most=MOST_HEADS,
        ),
    )
    max_position_embeddings: int | None = field(
        default=None,
        metadata=flag(
            "Rows of the learned position table.",
            affects="tensors",
            meaning="learned_positions",
            at_least=1,
            at_most=LONGEST_SEQUENCE,
        ),
    )
    position_embedding_type: PositionEmbedding = field(
        default="learned_absolute",
        metadata=flag(
            "How positions enter the model.",
            affects="model",
            constants={"--use-rotary-position-embeddings": "rope"},
            later=("yarn", "mrope", "relative"),
        ),
    )
    rotary_percent: float = field(
        default=1.0, metadata=flag("Part of each head that is rotated.", affects="model", above=0, at_most=1)
    )
    rotary_base: int = field(
        default=10000, metadata=flag("Base of the rotary frequencies.", affects="model", at_least=1)
    )
    rotary_interleaved: bool = field(
        default=False, metadata=flag("Rotate neighbours (2i, 2i+1) instead of halves.", affects="model")
    )
    rotary_seq_len_interpolation_factor: float | None = field(
        default=None, metadata=flag("Divide positions by this factor.", affects="model", above=0, usual=2.0)
    )
    use_rope_scaling: bool = field(
        default=False, metadata=flag("Scale rotary frequencies as Llama 3.1 does.", affects="model")
    )
    rope_scaling_factor: float = field(
        default=8.0, metadata=flag("Factor of --use-rope-scaling.", affects="model", above=0)
    )
    normalization: Normalization = field(default="LayerNorm", metadata=flag("Norm of every layer.", affects="tensors"))
    norm_epsilon: float = field(
        default=1e-5,
        metadata=flag("Epsilon inside the norms.", affects="model", aliases=("--layernorm-epsilon",), above=0),
    )
    layernorm_placement: LayerNormPlacement = field(
        default="pre",
        metadata=flag(
            "pre: a norm before attention and MLP, and one after the last layer; post: one after each residual sum, "
            "and one after the embeddings, as BERT was published.",
            affects="tensors",
        ),
    )
    apply_residual_connection_post_layernorm: bool = field(
        default=False,
        metadata=flag(
            "With norms before attention and MLP: add to what comes out of a norm, not to what goes into it.",
            affects="model",
        ),
    )
    activation: Activation = field(
        default="gelu_tanh",
        metadata=flag(
            "Function inside the MLP.",
            affects="model",
            constants={"--swiglu": "swiglu", "--squared-relu": "squared_relu", "--openai-gelu": "gelu_tanh"},
            later=("quick_geglu",),
        ),
    )
    add_bias_linear: bool = field(
        default=True,
        metadata=flag(
            "Biases in the linear layers.",
            off="--disable-bias-linear",
            off_help="No biases in the linear layers.",
            affects="tensors",
        ),
    )
    add_qkv_bias: bool = field(
        default=False,
        metadata=flag("Bias of the query/key/value projection, also without other biases.", affects="tensors"),
    )
    qk_layernorm: bool = field(default=False, metadata=flag("Normalize queries and keys per head.", affects="tensors"))
    window_size: tuple[int, int] | None = field(
        default=None,
        metadata=flag(
            "Attend to so many tokens to the left and right; -1 is no limit.",
            words=2,
            metavar="LEFT RIGHT",
            affects="model",
            at_least=-1,
            at_most=LONGEST_SEQUENCE,
        ),
    )
    untie_embeddings_and_output_weights: bool = field(
        default=False, metadata=flag("Give the output layer weights of its own.", affects="tensors")
    )
    normalize_output_weights: bool = field(
        default=False,
        metadata=flag(
            "Divide each row of the output layer's weight by its length, as Baichuan 2 does.", affects="model"
        ),
    )
    hidden_dropout: float = field(
        default=0.1,
        metadata=flag("Dropout on embeddings and residual branches.", affects="training", at_least=0, below=1),
    )
    attention_dropout: float = field(
        default=0.1, metadata=flag("Dropout on attention probabilities.", affects="training", at_least=0, below=1)
    )
    fast_attention_dropout: bool = field(
        default=False,
        metadata=flag(
            "Let the attention kernel draw its dropout: faster, and its masks depend on the tensor-parallel and "
            "micro-batch sizes.",
            affects="training",
        ),
    )
    cross_entropy_loss_fusion: bool = field(
        default=False,
        metadata=flag(
            "Fuse the loss with what --cross-entropy-fusion-impl names. Its own passes are one kernel in any case."
        ),
    )
    cross_entropy_fusion_impl: CrossEntropyFusion = field(
        default="native",
        metadata=flag(
            "With --cross-entropy-loss-fusion, native: the loss in one kernel, as it also is without the flag; linear: "
            "together with the output layer, in chunks of the vocabulary, so that the logits are never in memory, and "
            "are computed twice.",
            later=("te",),
        ),
    )
    recompute_granularity: Literal["selective", "full"] | None = field(
        default=None,
        metadata=flag(
            "Compute activations again in the backward instead of keeping them: parts of each layer, or whole layers.",
            constants={"--recompute-activations": "selective"},
        ),
    )
    recompute_modules: tuple[str, ...] | None = field(
        default=None,
        metadata=flag(
            "What --recompute-granularity selective recomputes: one or more of core_attn (when not given), layernorm, "
            "mlp.",
            words="+",
            metavar="MODULE",
        ),
    )
    recompute_method: Literal["uniform", "block"] | None = field(
        default=None,
        metadata=flag(
            "Layers that --recompute-granularity full recomputes: all, in runs of --recompute-num-layers of which the "
            "input is kept (uniform), or so many of each model chunk, one by one (block)."
        ),
    )
    recompute_num_layers: int | None = field(
        default=None, metadata=flag("Layers of --recompute-method.", at_least=1, at_most=MOST_LAYERS)
    )
    distribute_saved_activations: bool = field(
        default=False,
        metadata=flag("Keep the inputs of recomputed layers in parts, one on each tensor-parallel rank."),
    )
    fp32_residual_connection: bool = field(
        default=False,
        metadata=flag(
            "Keep the residual stream in fp32, between pipeline stages too; with --bf16 or --fp16.", affects="training"
        ),
    )
    apply_query_key_layer_scaling: bool = field(
        default=False,
        metadata=flag(
            "Divide attention scores by the number of their layer, and undo it in the fp32 softmax, so that scores of "
            "fp16 do not overflow.",
            off="--no-query-key-layer-scaling",
        ),
    )
    init_method_std: float = field(default=0.02, metadata=flag("Standard deviation of the initial weights.", above=0))
    embedding_init_method_std: float | None = field(
        default=None, metadata=flag("The same for embeddings; --init-method-std when not given.", above=0, usual=0.02)
    )

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (SwiGLU)."""
        return self.activation == "swiglu"

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.gated:
            return int((4 * self.hidden_size * 2 / 3) / 64) * 64
        return 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.kv_channels if self.kv_channels is not None else self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Key/value heads: as many as query heads without grouped-query attention."""
        if not self.group_query_attention:
            return self.num_attention_heads
        return self.num_query_groups if self.num_query_groups is not None else 1

    @property
    def query_size(self) -> int:
        """Width of all queries: heads x head width."""
        return self.num_attention_heads * self.head_dim

    @property
    def drops_attention_weights(self) -> bool:
        """Whether training drops attention weights by their global index, for which each must be in memory."""
        return self.attention_dropout > 0 and not self.fast_attention_dropout

    def computes_attention_weights(self, *, training: bool) -> bool:
        """Whether attention weights are in memory, one by one: no kernel without them drops or scales as is asked."""
        return self.apply_query_key_layer_scaling or (training and self.drops_attention_weights)

    @property
    def residual_is_normed(self) -> bool:
        """Whether what the layers add to is the output of a norm."""
        return self.layernorm_placement == "post" or self.apply_residual_connection_post_layernorm

    @property
    def tied_embeddings(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def fuses_output_layer(self) -> bool:
        """Whether the output layer and its loss are one operation, without logits."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def learned_positions(self) -> int | None:
        """Rows of the position table, if there is one."""
        return self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else None

    @property
    def qkv_size(self) -> int:
        """Rows of the projection to queries, keys and values."""
        return self.query_size + 2 * self.query_groups * self.head_dim

    @property
    def fc1_size(self) -> int:
        """Rows of the first projection of the MLP: twice `ffn_size` with a gate."""
        return self.ffn_size * (2 if self.gated else 1)

    @property
    def attention_weights(self) -> int:
        """Elements of the two matrices of an attention."""
        return self.hidden_size * (self.qkv_size + self.query_size)

    @property
    def mlp_weights(self) -> int:
        """Elements of the two matrices of an MLP."""
        return self.hidden_size * (self.fc1_size + self.ffn_size)

    @property
    def rotary_dim(self) -> int:
        """Rotated columns of each head."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The parts of a layer that are recomputed one by one."""
        if self.recompute_granularity != "selective":
            return ()
        return ("core_attn",) if self.recompute_modules is None else self.recompute_modules

    def recompute_units(self, layers: range) -> tuple[RecomputeUnit, ...]:
        """The layers of a model chunk as runs, of each of which the input is kept, or all, in their order."""
        if self.recompute_granularity != "full":
            return (RecomputeUnit(layers=layers, recomputed=False),) if layers else ()
        assert self.recompute_num_layers is not None
        if self.recompute_method == "uniform":
            step = self.recompute_num_layers
            return tuple(
                RecomputeUnit(layers=layers[first : first + step], recomputed=True)
                for first in range(0, len(layers), step)
            )
        first, rest = layers[: self.recompute_num_layers], layers[self.recompute_num_layers :]
        alone = tuple(RecomputeUnit(layers=range(layer, layer + 1), recomputed=True) for layer in first)
        return (*alone, RecomputeUnit(layers=rest, recomputed=False)) if rest else alone

    def problems(self) -> Iterator[Problem]:
        """What is wrong within this section."""
        yield from self._attention_problems()
        yield from self._norm_problems()
        yield from self._position_problems()
        yield from self._recompute_problems()
        if self.cross_entropy_fusion_impl == "linear" and not self.cross_entropy_loss_fusion:
            yield Problem(
                flags=("--cross-entropy-fusion-impl",),
                value="linear",
                rule="is a form of --cross-entropy-loss-fusion, which is off",
                works="--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear; or leave it out",
            )
        if self.ffn_size < 1:
            yield Problem(
                flags=("--ffn-hidden-size", "--hidden-size", "--activation"),
                rule=f"with SwiGLU it is 8/3 x --hidden-size {self.hidden_size} rounded down to a multiple "
                "of 64 when not given, and that is 0",
                works=f"--ffn-hidden-size {4 * self.hidden_size}; --hidden-size 24 or more",
            )

    def _attention_problems(self) -> Iterator[Problem]:
        heads, hidden, groups = self.num_attention_heads, self.hidden_size, self.num_query_groups
        if self.kv_channels is None and hidden % heads:
            yield Problem(
                flags=("--hidden-size", "--num-attention-heads"),
                value=hidden,
                rule=f"must be divisible by --num-attention-heads {heads}, or the width of a head be given",
                works=f"--hidden-size {near(multiples(hidden, heads), hidden)}; "
                f"--num-attention-heads {near(divisors(hidden), heads)}; "
                f"--kv-channels {max(1, hidden // heads)}",
            )
        if groups is not None and not self.group_query_attention:
            yield Problem(
                flags=("--num-query-groups", "--group-query-attention"),
                value=groups,
                rule="has an effect only with --group-query-attention",
                works=f"--group-query-attention --num-query-groups {groups}; or leave it out: "
                f"every one of the {heads} heads has its own keys and values",
            )
        elif groups is not None and heads % groups:
            yield Problem(
                flags=("--num-query-groups", "--num-attention-heads"),
                value=groups,
                rule=f"must divide --num-attention-heads {heads}",
                works=f"--num-query-groups {near(divisors(heads), groups)}",
            )
        if self.fast_attention_dropout and self.attention_dropout == 0:
            yield Problem(
                flags=("--fast-attention-dropout", "--attention-dropout"),
                rule="there is no attention dropout to speed up: --attention-dropout is 0",
                works="leave out --fast-attention-dropout",
            )
        if self.fast_attention_dropout and self.apply_query_key_layer_scaling:
            yield Problem(
                flags=("--fast-attention-dropout", "--apply-query-key-layer-scaling"),
                rule="is drawn by a fused kernel, and --apply-query-key-layer-scaling takes the explicit path",
                works="one of the two",
            )
        if self.window_size is not None:
            left, right = self.window_size
            if right > 0:
                yield Problem(
                    flags=("--window-size",),
                    value=f"{left} {right}",
                    rule="a GPT looks back only: RIGHT is 0 or -1",
                    works=f"--window-size {left} 0",
                )

    def _norm_problems(self) -> Iterator[Problem]:
        if self.layernorm_placement == "pre":
            return
        if self.apply_residual_connection_post_layernorm:
            yield Problem(
                flags=(RESIDUAL_AFTER_NORM, "--layernorm-placement"),
                rule="is so with --layernorm-placement post, where every residual is the output of a norm",
                works="one of the two",
            )
        if "layernorm" in self.recomputed_modules:
            yield Problem(
                flags=("--recompute-modules", "--layernorm-placement"),
                value="layernorm",
                rule="with --layernorm-placement post what a norm gives is the residual stream itself, which is kept",
                works="--recompute-modules core_attn mlp, or one of them",
            )

    def _position_problems(self) -> Iterator[Problem]:
        kind = self.position_embedding_type
        rotary = {
            "--rotary-percent": self.rotary_percent != 1.0,
            "--rotary-base": self.rotary_base != 10000,
            "--rotary-interleaved": self.rotary_interleaved,
            "--rotary-seq-len-interpolation-factor": self.rotary_seq_len_interpolation_factor is not None,
            "--use-rope-scaling": self.use_rope_scaling,
        }
        if kind != "rope":
            for name in (name for name, given in rotary.items() if given):
                yield Problem(
                    flags=(name, "--position-embedding-type"),
                    rule=f"has an effect only with rotary positions, and --position-embedding-type is {kind}",
                    works=f"--position-embedding-type rope; or leave out {name}",
                )
        elif self.rotary_dim < 2 or self.rotary_dim % 2:
            yield Problem(
                flags=("--rotary-percent", "--kv-channels", "--hidden-size", "--num-attention-heads"),
                value=self.rotary_percent,
                rule=f"rotates {self.rotary_dim} of the {self.head_dim} columns of a head; "
                "columns turn in pairs, so the number must be even and at least 2",
                works=self._rotary_advice(),
            )
        if self.rope_scaling_factor != 8.0 and not self.use_rope_scaling:
            yield Problem(
                flags=("--rope-scaling-factor", "--use-rope-scaling"),
                value=self.rope_scaling_factor,
                rule="has an effect only with --use-rope-scaling",
                works=f"--use-rope-scaling --rope-scaling-factor {self.rope_scaling_factor}",
            )

    def _recompute_problems(self) -> Iterator[Problem]:
        granularity = "--recompute-granularity"
        needs: dict[str, tuple[object, str]] = {
            "--recompute-modules": (self.recompute_modules, "selective"),
            "--recompute-method": (self.recompute_method, "full"),
            "--recompute-num-layers": (self.recompute_num_layers, "full"),
            "--distribute-saved-activations": (self.distribute_saved_activations or None, "full"),
        }
        for name, (value, needed) in needs.items():
            if value is None or self.recompute_granularity == needed:
                continue
            present = "it is not given" if self.recompute_granularity is None else f"it is {self.recompute_granularity}"
            shown = "" if value is True else " ".join(value) if isinstance(value, tuple) else value
            with_it = {granularity: needed}
            if needed == "full":  # what is given stays, as it was asked for
                given = {other: needs[other][0] for other in FULL_RECOMPUTATION}
                with_it |= {other: str(given[other] or best) for other, best in FULL_RECOMPUTATION.items()}
            yield Problem(
                flags=(name, granularity),
                value=shown,
                rule=f"belongs to {granularity} {needed}, and {present}",
                works=f"{_words(with_it)}; or leave out {name}",
            )
        missing = {name: best for name, best in FULL_RECOMPUTATION.items() if needs[name][0] is None}
        if self.recompute_granularity == "full" and missing:
            block = f" or more; or {_words(FULL_RECOMPUTATION)}, which keeps least"
            yield Problem(
                flags=(granularity, *missing),
                value="full",
                rule=f"needs {' and '.join(missing)}",
                works=_words(missing) + (block if self.recompute_method == "block" else ""),
            )
        for module in self.recompute_modules or ():
            if module not in RECOMPUTABLE:
                yield Problem(
                    flags=("--recompute-modules",),
                    value=module,
                    rule=f"is a part of {NOT_HERE[module]}, which this version has not"
                    if module in NOT_HERE
                    else "is not a known part of a layer",
                    works=f"--recompute-modules {' '.join(RECOMPUTABLE)}, or some of them",
                )

    def _rotary_advice(self) -> str:
        width = self.head_dim
        if width < 2 or width % 2:
            return f"--kv-channels {near(multiples(width, 2), width)}"
        even = max(2, self.rotary_dim // 2 * 2)
        return f"--rotary-percent {even / width:.6g} ({even} columns)"


def _words(flags: Mapping[str, str]) -> str:
    return " ".join(f"{name} {value}" for name, value in flags.items())
