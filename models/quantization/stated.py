"""A `quantization` setting that names how the checkpoint is stored already, as vLLM's users give it."""

from pathlib import Path

import msgspec

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.quantization_section import KEY, METHOD
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.setting_types import STORED_AS
from troupellm.protocol.errors import ConfigError


def settle_quantization(folder: Path, reader: ConfigReader, config: EngineConfig) -> tuple[ConfigReader, EngineConfig]:
    """The same reader, and the same configuration without a quantization that the checkpoint has already.

    Args:
        folder: of the model, or its GGUF file.
        reader: its config, with the quantization section that holds for the weights.

    Raises:
        ConfigError: the setting names another method than the checkpoint does; names both.
    """
    wanted = config.model.quantization
    if wanted is None:
        return reader, config
    stored = "gguf" if is_gguf(folder) else reader.section(KEY).values.get(METHOD)
    if wanted == stored:
        plain = msgspec.structs.replace(config.model, quantization=None)
        return reader, msgspec.structs.replace(config, model=plain)
    if wanted not in STORED_AS:
        return reader, config
    kind = f"is stored as {stored}" if stored else "is not quantized"
    raise ConfigError(
        f"quantization is {wanted}, but the checkpoint {kind}; leave the setting out", param="quantization"
    )
