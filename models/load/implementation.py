"""Chooses the implementation that runs a decoder: this package or transformers."""

from pathlib import Path

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, architecture_of
from troupellm.models.families.registry import describe_decoder, has_family
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.load.early_check import describe_without_transformers
from troupellm.models.load.reranker import settle_score
from troupellm.models.load.tied_head import settle_head
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

SPARSE = "sparse attention: sequences have at most {keys} tokens (index_topk), of which each one sees all before it"


def describe_served(folder: Path, reader: ConfigReader, config: ModelConfig, progress: ProgressSink) -> DecoderConfig:
    """The model as `model_impl` wants it run; the package transformers is imported only where it is to run it.

    Raises:
        ModelLoadError: no implementation can run the model, or not as its config.json demands.
        ConfigError: a setting does not fit the chosen implementation.
    """
    known = has_family(reader)
    if config.model_impl == "troupellm" or (config.model_impl == "auto" and known):
        model = describe_decoder(reader)
        if model.sparse_keys is not None:
            progress(LoadProgress(phase="resolve", detail=SPARSE.format(keys=model.sparse_keys)))
        settled = model if config.load_format == "dummy" else settle_head(folder, model, progress)
        return settle_score(folder, settled, config, progress)
    from troupellm.models.transformers_backend import describe

    if config.model_impl == "auto" and not describe.knows(reader):
        return describe_without_transformers(reader)
    if is_gguf(folder) and known:
        raise ConfigError("model_impl transformers reads safetensors, this is a GGUF file", param="model_impl")
    model = describe.describe(folder, reader)
    reason = "as model_impl says" if known else "troupellm has no family for it"
    if is_gguf(folder):
        reason += ", so that its weights are expanded"
    detail = f"{architecture_of(reader)} runs by the code of transformers, over our paged attention: {reason}"
    progress(LoadProgress(phase="resolve", detail=detail))
    return model
