"""One typed, frozen description of a decoder: everything that the skeleton needs to know about a family."""

from typing import Any, Literal

import msgspec

Activation = Literal["silu", "gelu_tanh"]
Mixer = Literal["attention", "short_conv", "gated_delta", "ssd", "none"]
QKNorm = Literal["none", "head", "full", "bare"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding and its scaling; which fields count depends on `kind`."""

    kind: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope or proportional."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    yarn_attn_factor: float = 1.0
    """Factor on top of the one that YaRN derives from `factor`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    turning: float = 1.0
    """Part of the frequencies, the first ones, that turn; the others are 0 (proportional)."""


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + beta * log(1 + floor(p / original)), which is 1 below `original`."""

    beta: float
    original: int
    ahead: int = 0
    """Added to each position."""
    unrotated: bool = False
    """In layers without rotation alone."""


class LayerNorms(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a layer's norms within the checkpoint, by place; None where there is no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Factor on the attention's addition to the residual."""
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


class LayerNormBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose norms also take off the mean."""

    norm_bias: bool = True
    parallel: bool = False
    """Attention and feed-forward both read the layer's input; they share a norm if `before_feed_forward` is None."""
    ungated: Literal["gelu", "gelu_tanh", "relu2"] | None = None
    """Activation of a feed-forward part without a gate."""


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint's names for the parts of a layer with experts."""

    blocks: tuple[str, ...] = ("mlp",)
    """Prefix of all of them; the first one that the checkpoint has is used."""
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    bias_in_row: bool = False
    """That bias is stored as one row [1, experts]."""
    shared: str = "shared_expert"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    transposed: bool = False
    """A tensor that holds all experts has inputs before outputs."""
    interleaved: bool = False
    """A tensor that holds all experts has the rows of gate and up by turns."""


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A feed-forward part that is a choice of experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    """Width of one expert."""
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Over all experts, each expert by itself, or over the logits of those that were chosen."""
    renormalize: bool = False
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """Factor on the weights, after all else."""
    groups: int = 1
    """Experts are chosen from the best `top_groups` of this many equal groups."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """A group's score: that of its best expert, or the sum of its two best."""
    choice_bias: bool = False
    """A bias of the router's counts while experts are chosen, but not in their weights."""
    wide_router: bool = False
    """The router computes in float32, for any dtype of the model."""
    bias: bool = False
    """Router and experts have biases."""
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    """If set: min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, -limit, limit) + 1); None is silu(gate) * up."""
    shared_size: int = 0
    """Width of the expert that all tokens share; 0 is none."""
    activation: Activation = "silu"
    """Activation of an expert's gate, without a limit."""
    weighs_inputs: bool = False
    """The weights of a token's experts multiply their inputs instead of their results."""
    beside_dense: bool = False
    """A feed-forward part without experts lies beside them. Both have norms of their own on the way, and the router
    reads what the layer's part for attention leaves, behind a norm without weight, times a weight per number; each
    expert has a factor of its own."""
    shared_gate: bool = False
    """The shared expert's result is multiplied by the sigmoid of one more projection."""
    names: ExpertNames = ExpertNames()


class LayerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a token for each layer, from a table of their own and from the token's embedding."""

    vocab_size: int
    size: int
    """Numbers per token and layer."""


class MlaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention whose keys and values are made from one small latent vector per token."""

    latent: int
    """Size of the cached latent vector."""
    rotated: int
    """Size of the rotated part of a head's key and query; all heads share this key part, and it is cached too."""
    plain: int
    """Size of the other part of a head's key and query."""
    value: int
    """Size of a head's value."""
    query_latent: int | None
    """Size of the latent vector that queries are made from; None makes them from the hidden state."""


class ShortConvConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The convolutions of layers with the mixer `short_conv`."""

    taps: int
    """Positions that one result depends on, its own included."""
    bias: bool = False
    """The convolution and the projections around it have biases."""


class GatedDeltaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with the mixer `gated_delta`."""

    key_heads: int
    value_heads: int
    """A multiple of `key_heads`."""
    key_size: int
    value_size: int
    """Of a head."""
    taps: int
    """Positions that one result of the convolution depends on, its own included."""
    grouped: bool = False
    """The checkpoint has the parts of each head of the keys together, in two projections instead of four."""

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with the mixer `ssd`."""

    heads: int
    head_size: int
    groups: int
    """Of heads, each with the same B and C; the gated norm is over each group, too."""
    state_size: int
    taps: int
    """Positions that one result of the convolution depends on, its own included."""
    conv_bias: bool = True
    bias: bool = False
    """The projections have biases."""
    least_step: float = 0.0
    most_step: float = float("inf")

    @property
    def width(self) -> int:
        """Of the layer's inner inputs."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Of the convolution: inputs, B and C."""
        return self.width + 2 * self.groups * self.state_size


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: all that layers of a model may differ in."""

    mixer: Mixer = "attention"
    """The part that mixes a token with those before it; `none` only with `single_parts`."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    """Numbers of a value, behind which the cache has zeros; None is head_dim."""
    window: int | None = None
    """The number of keys that a token sees, itself included; None is all."""
    chunk: int | None = None
    """Tokens see those of their chunk alone: position p from p - p % chunk on. Not together with a window."""
    kv_from: int | None = None
    """The layer whose keys and values it reads, without some of its own; None is itself."""
    keys_as_values: bool = False
    """Values are the projection of the keys, before their norm and rotation."""
    sinks: bool = False
    """Every head has one more logit, without a key, that takes part in the softmax."""
    rope: RopeConfig | None = None
    """None is no rotation."""
    rotary_dim: int | None = None
    """The number of a head's first values that are rotated; None is all."""
    intermediate_size: int
    """Width of the feed-forward part, where it has no experts."""
    experts: MoeConfig | None = None

    @property
    def query_width(self) -> int:
        """Numbers in a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers in a token's keys, and in the places of its values in the cache."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Numbers in a token's values."""
        return self.num_kv_heads * (self.value_dim or self.head_dim)

    @property
    def mixed_width(self) -> int:
        """Numbers in the attention's result for a token."""
        return self.num_heads * (self.value_dim or self.head_dim)


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerShape, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    checkpoint_dtype: str
    """The type the checkpoint says it has; float32 when it says nothing."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    """Norms of queries and keys before the rotation: one per head, or one over all heads together, or of every head
    that is rotated, without a weight."""
    value_scale: float = 1.0
    """Factor on every value."""
    value_norm: bool = False
    """Every value head is normed, without a weight."""
    head: Literal["lm", "score", "none"] = "lm"
    """The output layer: logits over the vocabulary, a classifier's logits, or none."""
    num_labels: int = 0
    """Number of a classifier's labels."""
    score_tokens: tuple[int, int] | None = None
    """Two tokens, for and against: a classifier of one label that subtracts the logit of one from that of the other."""
    hybrid_cache: bool = False
    """Layers with different windows have separate block tables, so that blocks older than a window are freed."""
    activation: Activation = "silu"
    """Activation of the gate."""
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    embedding_scale: float = 1.0
    scale_inputs: bool = False
    """True if the scale also applies to embeddings that a request brings."""
    residual_multiplier: float = 1.0
    """Factor on the results of attention and feed-forward before they are added to the residual."""
    attention_scale: float | None = None
    """Factor on the attention scores; None is 1 / sqrt(head_dim)."""
    query_growth: QueryGrowth | None = None
    attention_softcap: float = 0.0
    """Attention scores become cap * tanh(score / cap); 0 turns it off."""
    head_normed: bool = False
    """The head's rows are divided by their lengths."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    rope_interleaved: bool = False
    """Rotated pairs are neighbours, not halves."""
    qkv_name: str | None = None
    """The checkpoint's name of query, key and value in one tensor; None has three."""
    qkv_by_group: bool = False
    """That tensor has, for each head of the keys, the heads of its queries, its key and its value."""
    gate_up_name: str | None = None
    """The same for gate and up."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of the names of tensors, and what the checkpoint has for them."""
    text_part: bool = False
    """True if the checkpoint has other parts than this decoder; the decoder's tensors then have their own prefix."""
    layer_norms: LayerNormBlock | None = None
    """None is root-mean-square norms and a gate."""
    single_parts: bool = False
    """Each layer is one part behind one norm: its mixer, or a feed-forward part of squared ReLUs without a gate."""
    layer_scalar: bool = False
    """The residual is multiplied by a number of each layer behind it."""
    layer_inputs: LayerInputs | None = None
    """Only with `layer_scalar`."""
    head_bias: bool = False
    mla: MlaConfig | None = None
    sparse_keys: int | None = None
    """Keys that an indexer chooses for each token. It is not run: no sequence is longer, so that all are chosen."""
    short_conv: ShortConvConfig | None = None
    gated_delta: GatedDeltaConfig | None = None
    ssd: SsdConfig | None = None
    attention_gate: bool = False
    """The attention's result is multiplied by the sigmoid of one more projection."""
    implementation: Literal["troupellm", "transformers"] = "troupellm"
    """The code that runs the model."""
    num_parameters: int | None = None
    """Number of parameters, where it does not follow from the other fields."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_writing(self) -> int:
        """Layers up to the last one with keys and values of its own. Those behind it only read."""
        return 1 + max((layer for layer, shape in enumerate(self.layers) if shape.kv_from is None), default=-1)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, as of `LayerShape`."""
        return tuple(shape.window for shape in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotations of all layers, each once."""
        return tuple(dict.fromkeys(shape.rope for shape in self.layers if shape.rope is not None))

    @property
    def experts(self) -> MoeConfig | None:
        """Of the first layer that has some."""
        return next((shape.experts for shape in self.layers if shape.experts is not None), None)

    def with_layers(self, **fields: Any) -> "DecoderConfig":
        """The same model with other values of some fields of its layers.

        Args:
            fields: a tuple has one value per layer; any other value is that of all layers.
        """
        values = {
            name: value if isinstance(value, tuple) else (value,) * len(self.layers) for name, value in fields.items()
        }
        layers = tuple(
            msgspec.structs.replace(shape, **dict(zip(values, row, strict=True)))
            for shape, *row in zip(self.layers, *values.values(), strict=True)
        )
        return msgspec.structs.replace(self, layers=layers)

    def query_key_value(self, shape: LayerShape) -> dict[str, int]:
        """Names of the projections to queries, keys and values, and their widths, in the order of the outputs."""
        query, key = shape.query_width, shape.key_width
        if self.qkv_name is not None:
            return {self.qkv_name: query + key + shape.value_width}
        if shape.kv_from is not None:
            return {"q_proj": query}
        own = {"q_proj": query, "k_proj": key}
        return own if shape.keys_as_values else own | {"v_proj": shape.value_width}

    def gate_up(self, size: int) -> dict[str, int]:
        """The same of the projections to gate and up of a feed-forward part of that inner size, or to up alone."""
        if self.single_parts or (self.layer_norms is not None and self.layer_norms.ungated is not None):
            return {"up_proj": size}
        return {"gate_proj": size, "up_proj": size} if self.gate_up_name is None else {self.gate_up_name: 2 * size}
