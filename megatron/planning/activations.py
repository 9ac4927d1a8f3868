"""Bytes that a micro-batch keeps between forward and backward: the formulas of the paper, and those of this model.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), sections 4
and 5. Its letters are in docs/NOTATION.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron.config.megatron_config import MegatronConfig
from megatron.config.pipeline_layout import StageLayout
from megatron.model.masks import LONGEST_WITH_ONE_MASK, goes_by_blocks

# Of an index or a token number, and of a number in fp32.
_INDEX, _FLOAT = 8, 4


def paper_bytes_per_layer(
    *,
    sequence_length: int,
    micro_batch_size: int,
    hidden_size: int,
    num_attention_heads: int,
    tensor_parallel_size: int = 1,
    sequence_parallel: bool = False,
    recompute: str | None = None,
) -> float:
    """The paper's bytes of a layer, in 16 bits and with dropout: equations 1, 2, 4, 5 and 6, table 2.

    Args:
        recompute: None, "selective" for the core of attention, or "full", where only the input of the layer is kept.
    """
    sbh, t = sequence_length * micro_batch_size * hidden_size, tensor_parallel_size
    scores = 0.0 if recompute == "selective" else 5 * num_attention_heads * sequence_length / hidden_size
    if recompute == "full":
        return 2 * sbh / (t if sequence_parallel else 1)
    if sequence_parallel:
        return sbh / t * (34 + scores)
    return sbh * (10 + 24 / t + scores / t)


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """What one layer of this model keeps, by the part that needs it.

    Attributes:
        input: the hidden states that enter it.
        norms: statistics of the norms, and the hidden states that enter the second one.
        normed: the outputs of the norms.
        projection: the projected queries, keys and values, where the norms of queries and keys need them.
        core_inputs: queries, keys and values as they enter attention.
        core: what attention keeps besides.
        context: the output of attention.
        mlp: what the two products and the activation keep, without the norm's output.
    """

    input: int
    norms: int
    normed: int
    projection: int
    core_inputs: int
    core: int
    context: int
    mlp: int

    @property
    def whole(self) -> int:
        """Everything: what is kept without recomputation."""
        return sum(getattr(self, field.name) for field in fields(self))


def layer_bytes(config: MegatronConfig) -> LayerBytes:
    """What a layer keeps of one micro-batch on a rank, if nothing is recomputed."""
    model, t = config.model, config.parallel.tensor_model_parallel_size
    item, length = config.optimizer.params_dtype.itemsize, config.data.seq_length
    tokens = length * config.training.micro_batch_size
    own_tokens = tokens // t if config.parallel.sequence_parallel else tokens
    residual = own_tokens * model.hidden_size * _residual_itemsize(config)
    heads, groups = model.num_attention_heads // t, max(1, model.query_groups // t)
    queries, keys = tokens * heads * model.head_dim * item, tokens * groups * model.head_dim * item
    projection, core_inputs = 0, queries + 2 * keys
    if model.qk_layernorm:  # the values stay a part of it
        projection = core_inputs + tokens * (heads + groups) * _statistics_bytes(config)
        core_inputs = queries + keys
    if model.computes_attention_weights(training=True):
        kept = 2 if model.attention_dropout > 0 else 1  # the weights, and what dropout leaves of them
        # Keys are scaled, and kept so. Unscaled ones are kept too where they are a part of the whole projection.
        scaled_keys = 0 if model.qk_layernorm or model.position_embedding_type == "rope" else keys
        core = tokens * heads * length * kept * item + scaled_keys
    else:
        core = tokens * heads * max(_FLOAT, item)  # the log-sum-exp of each row of scores
        if mask := _mask_positions(config):  # as numbers, and with keys and values for each head
            core += mask * item + 2 * (queries - keys)
    activated = tokens * (model.ffn_size // t) * item
    # A squared ReLU keeps the ReLU; the others keep what enters them, of which SwiGLU has two parts.
    entering = 2 * activated if model.gated else activated
    return LayerBytes(
        input=residual,
        norms=residual + 2 * own_tokens * _statistics_bytes(config),
        normed=2 * own_tokens * model.hidden_size * item,
        projection=projection,
        core_inputs=core_inputs,
        core=core,
        context=queries,
        mlp=entering + activated,
    )


def _residual_itemsize(config: MegatronConfig) -> int:
    return _FLOAT if config.model.fp32_residual_connection else config.optimizer.params_dtype.itemsize


def _mask_positions(config: MegatronConfig) -> int:
    """Elements of the mask of a fused attention; 0 where every earlier position is allowed."""
    length, window = config.data.seq_length, config.model.window_size
    if config.bert is not None:  # which keys are padding
        return length * config.training.micro_batch_size
    if config.data.reset_attention_mask:
        widest = LONGEST_WITH_ONE_MASK if goes_by_blocks(config.model, length, training=True) else length
        return length * widest * config.training.micro_batch_size
    return length**2 if window is not None and 0 <= window[0] < length - 1 else 0


def _statistics_bytes(config: MegatronConfig) -> int:
    """Of a row that is normalised: its root mean square, or its mean and standard deviation."""
    numbers = 1 if config.model.normalization == "RMSNorm" else 2
    return numbers * max(_FLOAT, config.optimizer.params_dtype.itemsize)


def kept_by_layers(config: MegatronConfig, layers: range) -> int:
    """What the layers of a chunk keep of one micro-batch on a rank, with the recomputation of the configuration."""
    model, layer = config.model, layer_bytes(config)
    parts = config.parallel.tensor_model_parallel_size if model.distribute_saved_activations else 1
    whole = layer.whole - _spared_by_modules(config, layer)
    units = model.recompute_units(layers)
    return round(sum(layer.input / parts if unit.recomputed else len(unit.layers) * whole for unit in units))


def _spared_by_modules(config: MegatronConfig, layer: LayerBytes) -> int:
    modules = config.model.recomputed_modules
    spared = 0
    if "core_attn" in modules:
        spared += layer.core
    if "layernorm" in modules:
        spared += layer.normed
    if "mlp" in modules:
        spared += layer.mlp
    return spared


def chunk_bytes(config: MegatronConfig, stage: StageLayout, padded_vocab_size: int) -> int:
    """What a model chunk keeps of one micro-batch on a rank."""
    ends = _end_bytes(config, stage, padded_vocab_size)
    return kept_by_layers(config, stage.layers) + _shared_bytes(config) + ends


def recomputed_bytes(config: MegatronConfig, stage: StageLayout) -> int:
    """The most that a backward computes again at one time: a run of layers, or the largest part of a layer."""
    layer, model = layer_bytes(config), config.model
    units = [
        len(unit.layers) * layer.whole - layer.input for unit in model.recompute_units(stage.layers) if unit.recomputed
    ]
    parts = {"core_attn": layer.core, "layernorm": layer.normed // 2, "mlp": layer.mlp}
    return max([0, *units, *(parts[module] for module in model.recomputed_modules if stage.layers)])


def _shared_bytes(config: MegatronConfig) -> int:
    """What all layers of a chunk share: a mask of booleans, and the rotary table."""
    model, length = config.model, config.data.seq_length
    mask = _mask_positions(config)
    if model.computes_attention_weights(training=True) and config.bert is None:
        mask = max(mask, length**2) if model.position_embedding_type != "alibi" else 0  # what is added is not kept
    rotary = 0
    if model.position_embedding_type == "rope":
        tokens = length * config.training.micro_batch_size
        rotary = 2 * tokens * (model.rotary_dim // 2) * config.optimizer.params_dtype.itemsize
    return mask + rotary


def _end_bytes(config: MegatronConfig, stage: StageLayout, padded_vocab_size: int) -> int:
    """What embedding, last norm, output layer and loss keep."""
    model, t = config.model, config.parallel.tensor_model_parallel_size
    item, tokens = config.optimizer.params_dtype.itemsize, config.data.seq_length * config.training.micro_batch_size
    own_tokens = tokens // t if config.parallel.sequence_parallel else tokens
    of_hidden = own_tokens * model.hidden_size * item
    of_norm = own_tokens * _statistics_bytes(config)
    kept = 0
    if stage.has_embedding:
        kept += tokens * (_INDEX + (t > 1))  # rows of the word embedding, and which of them lie elsewhere
        if model.position_embedding_type == "learned_absolute":
            kept += tokens * _INDEX
        if config.bert is not None and config.bert.num_token_types:
            kept += tokens * _INDEX
        if model.layernorm_placement == "post":
            kept += of_hidden + of_norm
    if stage.has_output:
        kept += of_hidden  # what enters the output layer, or a head before it
        if model.layernorm_placement == "pre":
            kept += own_tokens * model.hidden_size * _residual_itemsize(config) + of_norm
        if config.bert is not None:  # what the dense layer, the GELU and the norm give
            kept += 3 * of_hidden + of_norm
        if not model.fuses_output_layer:
            kept += tokens * (padded_vocab_size // t) * item  # the logits
        if model.normalize_output_weights:  # the rows as they are multiplied, and as wide as their length is taken
            kept += padded_vocab_size // t * model.hidden_size * (item + (_FLOAT if item < _FLOAT else 0))
        kept += tokens * (_INDEX + 2 * max(_FLOAT, item))  # targets, log-sum-exp, loss mask
    return kept
