"""Settings and models that several ranks do not serve. They are refused by name before anything large is read."""

from pathlib import Path

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.parallel.local_config import PARAM, check_divides
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.quantization.checkpoint import QuantizationFormat
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError


def check_parallel(folder: Path, model: DecoderConfig, config: EngineConfig, form: QuantizationFormat | None) -> None:
    """
    Args:
        model: whole.
        form: how its weights are quantized.

    Raises:
        ConfigError: the model, or a setting, is not served by several ranks.
    """
    size = config.parallel.tensor_parallel_size
    refused = [text for text, found in _refused(folder, model, config, form) if found]
    if refused:
        raise ConfigError(f"{PARAM} {size} does not serve {refused[0]} yet; use {PARAM} 1", param=PARAM)
    check_divides(model, size)


def refuse_ranks(ranks: Ranks | None, what: str) -> None:
    """
    Raises:
        ConfigError: there are several ranks, which do not serve that.
    """
    if ranks is not None:
        raise ConfigError(f"{PARAM} {ranks.size} does not serve {what} yet; use {PARAM} 1", param=PARAM)


def _refused(
    folder: Path, model: DecoderConfig, config: EngineConfig, form: QuantizationFormat | None
) -> tuple[tuple[str, bool], ...]:
    """Names of refused features, and whether each is in use."""
    mixers = {shape.mixer for shape in model.layers}
    return (
        ("GGUF files", is_gguf(folder)),
        ("quantized checkpoints", form is not None),
        ("quantization on load", config.model.quantization is not None),
        (f"the cache type {config.cache.kv_cache_dtype}", config.cache.kv_cache_dtype != "auto"),
        ("models that run by the code of transformers", model.implementation == "transformers"),
        ("layers with states", mixers != {"attention"}),
        ("latent attention (MLA)", model.mla is not None),
        ("experts beside a dense part", model.experts is not None and model.experts.beside_dense),
        ("attention with gates", model.attention_gate),
        ("norms over all heads together", model.qk_norm == "full"),
        ("layers that read the keys of others", any(shape.kv_from is not None for shape in model.layers)),
        ("scaled layers with inputs of their own", model.layer_scalar),
        ("embeddings and classification alone", model.head != "lm" or config.model.runner == "pooling"),
        ("adapters", config.lora.enabled),
        ("speculative decoding", config.speculation.speculative_config is not None),
        ("KV offloading", config.offload.on),
        ("poison_memory", config.worker.poison_memory != "off"),
        ("batch_invariant", config.worker.batch_invariant),
    )
