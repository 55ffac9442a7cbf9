"""One typed, frozen description of a decoder: all that the skeleton needs to know about a family."""

from typing import Literal

import msgspec

Activation = Literal["silu", "gelu_tanh"]
QKNorm = Literal["none", "head", "full"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding and its scaling; which fields count depends on `kind`."""

    kind: str = "default"
    """default, linear, dynamic, llama3, yarn or longrope."""
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    yarn_attn_factor: float = 1.0
    """On top of what YaRN makes of `factor`."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


class LayerNorms(msgspec.Struct, frozen=True, kw_only=True):
    """Names of a layer's norms within the checkpoint, by place; None where there is no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Of what the attention adds to the residual."""
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint calls the parts of a layer with experts."""

    blocks: tuple[str, ...] = ("mlp",)
    """Of all of them together; the first that the checkpoint has."""
    router: str = "gate"
    shared: str = "shared_expert"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False
    """A tensor that holds all experts has the rows of gate and up by turns, and inputs before outputs."""


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose feed-forward part is a choice of experts."""

    layers: tuple[bool, ...]
    """Per layer, whether it has experts."""
    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one expert."""
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """Over all experts, each expert by itself, or over the logits of those that were chosen."""
    renormalize: bool = False
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """Factor on the weights, after all else."""
    groups: int = 1
    """Experts are chosen out of the best `top_groups` of so many equal groups."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """What a group is worth: its best expert's score, or the sum of its two best."""
    choice_bias: bool = False
    """The router's `e_score_correction_bias` counts while experts are chosen, but not in their weights."""
    wide_router: bool = False
    """The router computes in float32, whatever the type of the model."""
    bias: bool = False
    """Of router and experts."""
    swiglu_alpha: float = 1.0
    swiglu_limit: float | None = None
    """With it: min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, -limit, limit) + 1); None is silu(gate) * up."""
    shared_size: int = 0
    """Of the expert that all tokens share; 0 is none."""
    shared_gate: bool = False
    """The shared expert's result is weighed by the sigmoid of one more projection."""
    names: ExpertNames = ExpertNames()


class MlaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention whose keys and values are made from one small latent vector per token."""

    latent: int
    """Size of the cached latent vector."""
    rotated: int
    """Of the part of a head's key and query that is rotated; all heads have it in common, and it is cached too."""
    plain: int
    """Of the other part of a head's key and query."""
    value: int
    """Of a head's value."""
    query_latent: int | None
    """Of the latent vector that queries are made from; None makes them from the hidden state."""


class DecoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with gated feed-forward layers and root-mean-square norms."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    checkpoint_dtype: str
    """The type the checkpoint says it has; float32 when it says nothing."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    """Norms of queries and keys before the rotation: of every head, or of all heads together."""
    head: Literal["lm", "score", "none"] = "lm"
    """What is on top: the vocabulary's scores, a classifier's, or nothing."""
    num_labels: int = 0
    """Of a classifier."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many keys a token sees, itself included; None is all."""
    hybrid_cache: bool = False
    """Layers with different windows have block tables of their own, so that blocks behind a window are given back."""
    activation: Activation = "silu"
    """Of the gate."""
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0
    """Added to every norm's weight."""
    embedding_scale: float = 1.0
    scale_inputs: bool = False
    """Whether the scale is of embeddings that a request brings, too."""
    residual_multiplier: float = 1.0
    """Of what attention and feed-forward add to the residual."""
    attention_scale: float | None = None
    """Of the scores; None is 1 / sqrt(head_dim)."""
    attention_sinks: bool = False
    """Every head has one more logit, without a key, that takes part in the softmax."""
    attention_softcap: float = 0.0
    """Scores become cap * tanh(score / cap); 0 is without."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    rotary_dim: int | None = None
    """How many of a head's first values are rotated; None is all."""
    rope_interleaved: bool = False
    """Rotated pairs are neighbours, not halves."""
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    """Per layer, None is no rotation; empty is `rope` for all."""
    qkv_name: str | None = None
    """The checkpoint's name of query, key and value in one tensor; None has three."""
    gate_up_name: str | None = None
    """The same for gate and up."""
    text_part: bool = False
    """Whether the checkpoint has other parts than this decoder, whose tensors are under a name of its own there."""
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    implementation: Literal["troupellm", "transformers"] = "troupellm"
    """Whose code runs it."""
    num_parameters: int | None = None
    """Numbers in its tensors where they do not follow from the rest."""

    def rope_of(self, layer: int) -> RopeConfig | None:
        """A layer's rotation; None is without."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope
