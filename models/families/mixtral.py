"""Mixtral: Mistral with experts in every layer. The arithmetic follows the reference implementation in
`transformers`."""

from troupellm.models.config.decoder_config import DecoderConfig, ExpertNames, MoeConfig
from troupellm.models.config.expert_config import expert_counts
from troupellm.models.config.hf_config import ConfigReader, decoder_config, layer_windows

ARCHITECTURES = ("MixtralForCausalLM",)


def describe(reader: ConfigReader) -> DecoderConfig:
    """Build the description from this family's config.json."""
    reader = reader.with_defaults(rms_norm_eps=1e-5, rope_theta=1e6)
    window = reader.integer("sliding_window") if reader.is_on("sliding_window") else None
    config = decoder_config(reader, windows=layer_windows(reader, window))
    num_experts, top_k = expert_counts(reader, 8, 2)
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("intermediate_size"),
        renormalize=True,
        names=ExpertNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2"),
    )
    return config.with_layers(experts=moe)
