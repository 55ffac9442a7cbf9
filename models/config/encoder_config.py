"""BERT and its relatives as one typed description: every token sees every other one, norms come after each part."""

import msgspec

from troupellm.models.config.hf_config import FILE, ConfigReader, architecture_of
from troupellm.models.config.pooling_config import Activation, classifier_activation, read_labels
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.params.pooling import PoolingType

BERT, ROBERTA, DISTILBERT = "bert", "roberta", "distilbert"
_NAMES = {
    # class name in `transformers`: family
    "Bert": BERT,
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "Camembert": ROBERTA,
    "DistilBert": DISTILBERT,
}
_KINDS = ("Model", "ForMaskedLM", "ForSequenceClassification")
ENCODERS = {f"{name}{kind}": (family, kind) for name, family in _NAMES.items() for kind in _KINDS}
"""Architecture: family, and the head on top of it."""
BY_TRANSFORMERS = "transformers"
"""The family of encoders that the code of `transformers` runs."""
OTHER_ENCODERS = {
    f"{name}{kind}": kind
    for name in ("EuroBert", "Gte", "JinaEmbeddingsV3", "ModernBert", "NomicBert")
    for kind in ("Model", "ForMaskedLM")
} | {"ModernBertForSequenceClassification": "ForSequenceClassification"}
"""Architecture of such an encoder, and the head on top of it."""
LOOKS_AHEAD = ("Gemma3TextModel",)
"""Decoders that are encoders of that kind where config.json says so: EmbeddingGemma."""
_HIDDEN_ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


class EncoderConfig(msgspec.Struct, frozen=True, kw_only=True):
    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    layer_norm_eps: float
    hidden_act: str
    type_vocab_size: int
    """Number of token types; 0 if tokens of two texts are not distinguished."""
    num_positions: int
    """Rows of the position table."""
    position_offset: int
    """Row of the first token's position."""
    pad_token_id: int | None
    """Tokens with this id take no position, where the family counts positions so."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels."""
    activation: Activation = "softmax"
    """The activation on the classifier's logits."""
    masked_lm: bool = False
    """The checkpoint has a head for masked-language training, which is not used."""
    pooling_type: PoolingType = "CLS"
    """The tokens that a classifier reads."""
    num_parameters: int | None = None
    """Numbers in the tensors, where they do not follow from the other fields."""

    @property
    def max_length(self) -> int:
        """Longest prompt."""
        return self.num_positions - self.position_offset

    @property
    def num_weights(self) -> int:
        """Numbers in the model's tensors."""
        if self.num_parameters is not None:
            return self.num_parameters
        size = self.hidden_size
        layer = 4 * (size + 1) * size + 2 * size * self.intermediate_size + self.intermediate_size + 5 * size
        tables = (self.vocab_size + self.num_positions + self.type_vocab_size + 2) * size
        head = (size + 1) * (size + len(self.labels)) if self.labels else 0
        return tables + self.num_layers * layer + head


def runs_by_transformers(reader: ConfigReader) -> bool:
    """True for an encoder that the code of `transformers` runs."""
    architecture = architecture_of(reader)
    if architecture in LOOKS_AHEAD:
        return reader.flag("use_bidirectional_attention", False)
    return architecture in OTHER_ENCODERS


def describe_encoder(reader: ConfigReader) -> EncoderConfig:
    """Read and check the config.json of an architecture in `ENCODERS`.

    Raises:
        ModelLoadError: a value is missing, wrong, or asks for something that is not built.
    """
    architecture = architecture_of(reader)
    family, kind = ENCODERS[architecture]
    if reader.has("quantization_config"):
        raise ModelLoadError(f"{FILE}: quantization_config: quantized checkpoints are not supported")
    if reader.flag("is_decoder", False) or reader.flag("add_cross_attention", False):
        raise reader.refuse("is_decoder", "must be false")
    reader.choice("position_embedding_type", ("absolute",), "absolute")
    distil = family == DISTILBERT
    hidden_size = reader.integer("dim" if distil else "hidden_size")
    heads = "n_heads" if distil else "num_attention_heads"
    if hidden_size % reader.integer(heads):
        raise reader.refuse(heads, f"must divide the hidden size ({hidden_size})")
    if distil and reader.flag("sinusoidal_pos_embds", False):
        raise reader.refuse("sinusoidal_pos_embds", "must be false")
    counts_pads = family == ROBERTA
    pad = reader.integer("pad_token_id", 1, least=0) if counts_pads else None
    offset = 0 if pad is None else pad + 1
    labels = read_labels(reader) if kind == "ForSequenceClassification" else ()
    return EncoderConfig(
        architecture=architecture,
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("hidden_dim" if distil else "intermediate_size"),
        num_layers=reader.integer("n_layers" if distil else "num_hidden_layers"),
        num_heads=reader.integer(heads),
        layer_norm_eps=1e-12 if distil else reader.number("layer_norm_eps", 1e-12),
        hidden_act=reader.choice("activation" if distil else "hidden_act", _HIDDEN_ACTS, "gelu"),
        type_vocab_size=0 if distil else reader.integer("type_vocab_size", 2),
        num_positions=reader.integer("max_position_embeddings", least=offset + 1),
        position_offset=offset,
        pad_token_id=pad,
        labels=labels,
        activation=classifier_activation(reader, len(labels)) if labels else "softmax",
        masked_lm=kind == "ForMaskedLM",
    )
