"""A tokenizer.json that was published beside a GGUF file: it counts instead of the file's own vocabulary, whose rules
are only a name."""

import logging
from pathlib import Path

from tokenizers import Tokenizer

from troupellm.models.config.gguf_special_tokens import CONTROL, UNUSED, vocabulary
from troupellm.models.config.model_documents import read_json
from troupellm.models.hub.gguf_header import read_header
from troupellm.models.hub.model_folder import check_file
from troupellm.models.tokenizer.tokenizer_files import Loaded, load_backend

logger = logging.getLogger("troupellm.models")

LEAST_EQUAL = 0.9
"""Share of the tokens whose ids must be equal: converters spell some tokens in another way, spaces above all."""


def published_tokenizer(path: Path) -> Loaded | None:
    """The tokenizer of the folder that a GGUF file lies in; none if there is none, or if it is another model's.

    Raises:
        ModelLoadError: it cannot be read.
    """
    file = path.parent / "tokenizer.json"
    check_file(file)
    if not file.is_file():
        return None
    loaded = load_backend(path.parent, read_json(path.parent / "tokenizer_config.json"))
    differing = _differing(path, loaded.backend)
    if differing is None:
        logger.info("%s: its tokenizer is the tokenizer.json beside it", path.name)
        return loaded
    logger.warning("%s: the tokenizer.json beside it is that of another model: %s", path.name, differing)
    return None


def _differing(path: Path, backend: Tokenizer) -> str | None:
    """Why the tokenizer is not that of the file."""
    tokens, kinds = vocabulary(read_header(path))
    ids: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    if max(ids.values(), default=0) >= len(tokens):
        return f"it has {max(ids.values()) + 1} tokens, not {len(tokens)}"
    used = [index for index, kind in enumerate(kinds) if kind != UNUSED]
    others = [index for index in used if ids.get(tokens[index]) != index]
    control = next((index for index in others if kinds[index] == CONTROL and tokens[index] in ids), None)
    if control is None and len(others) <= (1 - LEAST_EQUAL) * len(used):
        return None
    index = others[0] if control is None else control
    return f"token {tokens[index][:80]!r} has the id {ids.get(tokens[index])}, not {index}"
