"""Keys of config.json that all models with experts share."""

from troupellm.models.config.hf_config import ConfigReader


def expert_counts(reader: ConfigReader, experts: int, chosen: int) -> tuple[int, int]:
    """The number of experts per layer, under either name that is in use, and the number of experts per token.

    Args:
        experts, chosen: defaults where config.json has no value.
    """
    key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    count, top_k = reader.integer(key, experts), reader.integer("num_experts_per_tok", chosen)
    if top_k > count:
        raise reader.refuse("num_experts_per_tok", f"must be at most {key} ({count})")
    return count, top_k


def sparse_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Per layer whether it has experts: every `decoder_sparse_step`-th, but none of `mlp_only_layers`."""
    num_layers, step = reader.integer("num_hidden_layers"), reader.integer("decoder_sparse_step", 1)
    plain = reader.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in plain):
        raise reader.refuse("mlp_only_layers", f"must be a list of layers below {num_layers}")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(num_layers))
