"""The JSON files that a model folder has, made from one GGUF file."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from troupellm.models.config.gguf_config import model_config
from troupellm.models.config.gguf_special_tokens import end_ids, generation_config, tokenizer_config
from troupellm.models.hub.gguf_header import read_header


def document(path: Path, name: str) -> dict[str, Any]:
    """One of config.json, tokenizer_config.json and generation_config.json; any other is empty.

    Raises:
        ModelLoadError: the file is damaged, or of a model that is not supported.
    """
    state = path.stat()
    return dict(_documents(path, state.st_mtime_ns, state.st_size).get(name, {}))


@lru_cache(maxsize=2)
def _documents(path: Path, _modified: int, _size: int) -> dict[str, dict[str, Any]]:
    """The three documents, cached: they are requested one by one, while the header may be long."""
    header = read_header(path)
    return {
        "config.json": model_config(header) | {"eos_token_id": end_ids(header) or None},
        "tokenizer_config.json": tokenizer_config(header),
        "generation_config.json": generation_config(header),
    }
