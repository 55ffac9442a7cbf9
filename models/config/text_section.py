"""The places in config.json where a checkpoint with other parts describes its decoder."""

from collections.abc import Mapping
from typing import Any

from troupellm.models.config.hf_config import ConfigReader

SECTIONS = (("text_config",), ("llm_config",), ("language_config",), ("thinker_config", "text_config"))


def text_section(reader: ConfigReader) -> ConfigReader:
    """The section of the decoder; empty where the file has none.

    Raises:
        ModelLoadError: it is no object.
    """
    for place in SECTIONS:
        found = reader
        for key in place:
            found = found.section(key)
        if found.values:
            return found
    return reader.section(SECTIONS[0][0])


def text_values(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The levels of a config.json that may speak of its text, the section of the decoder first."""
    return [level for level in (text_section(ConfigReader(values)).values, values) if level]
