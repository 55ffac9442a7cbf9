"""Refuses models that cannot be served as early as possible.

Their small files are checked before weights are downloaded. The headers of weight files are checked before a worker
imports torch, compiles kernels and reads weights.
"""

from pathlib import Path

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import Renderer
from troupellm.models.checkpoint.safetensors_header import check_header
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.encoder_config import ENCODERS, describe_encoder
from troupellm.models.config.hf_config import ConfigReader, architecture_of
from troupellm.models.config.transformers_package import INSTALL, has_transformers
from troupellm.models.families.registry import describe_decoder, has_family, is_encoder
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.weight_files import folder_weight_files
from troupellm.models.load.architecture import asks_transformers, read_config
from troupellm.models.tokenizer.served import check_fit, tokenizer_folder
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError


def check_before_weights(folder: Path, config: ModelConfig, renderer: Renderer) -> None:
    """Refuse a model that cannot be served, as far as its configuration, tokenizer and chat template show.

    Architectures and types that only `transformers` may have are left to the loader: asking the package imports torch.

    Args:
        folder: has all files but the weights.
        renderer: for the chat template, which is not trusted.

    Raises:
        ModelLoadError: names the file, the key and the value.
    """
    _check_config(folder, config)
    home = tokenizer_folder(folder, config)
    check_fit(Tokenizer.load(home), folder, home, None)
    ChatTemplate.load(home, config.chat_template, renderer)


def check_stored(folder: Path, config: ModelConfig) -> None:
    """Refuse a model that cannot be served, as far as its configuration and the headers of its weight files show.

    Args:
        folder: has all files of the model; or a GGUF file.

    Raises:
        ModelLoadError: names the file; a weight file is missing, cut or damaged.
    """
    _check_config(folder, config)
    if config.load_format != "dummy" and not is_gguf(folder):
        for name in folder_weight_files(folder):
            check_header(folder / name)


def _check_config(folder: Path, config: ModelConfig) -> None:
    if config.model_impl == "transformers" or asks_transformers(ConfigReader.load(folder)):
        return
    reader = read_config(folder).reader
    if is_encoder(reader):
        if architecture_of(reader) in ENCODERS:  # others are left to the loader, since the package imports torch
            describe_encoder(reader)
    elif config.model_impl == "troupellm" or has_family(reader):
        describe_decoder(reader)
    elif not has_transformers():
        describe_without_transformers(reader)


def describe_without_transformers(reader: ConfigReader) -> DecoderConfig:
    """Describe a decoder by our families; where the package is not installed, the refusal says that it may know more.

    Raises:
        ModelLoadError: as `describe_decoder`.
    """
    try:
        return describe_decoder(reader)
    except ModelLoadError as error:
        if has_transformers():
            raise
        hint = f"transformers may know it: {INSTALL}; {error.hint}"
        raise ModelLoadError(error.message, hint=hint) from error
