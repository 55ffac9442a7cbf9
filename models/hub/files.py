"""Selects the files of a repository that are read beside its weights; no other file is downloaded."""

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from troupellm.models.hub.weight_files import INDEX

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_MODEL = frozenset(
    {
        CONFIG, INDEX, "generation_config.json", "quantize_config.json", "quant_config.json",
        "quantization_config.json", "hf_quant_config.json", "modules.json", "sentence_bert_config.json",
    }
)  # fmt: skip
_TEXT = frozenset(
    {
        TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
        "chat_template.json",
    }
)  # fmt: skip
_BESIDE_GGUF = (TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", CONFIG)
_VOCABULARIES = frozenset({"tekken.json", "vocab.json", "vocab.txt", "merges.txt", "dict.txt", "bpe.codes"})
_VOCABULARY_SUFFIXES = (".model", ".tiktoken", ".spm")
"""Read where there is no tokenizer.json."""
_MODULES = re.compile(r"[0-9]{1,2}_((Pooling|Dense|LogitScore)/config\.json|Dense/model\.safetensors)")
"""Modules of sentence-transformers behind the model."""
_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")


def small_files(names: Collection[str], *, with_tokenizer: bool = True) -> list[str]:
    """The files that are read beside the weights, config.json first.

    Args:
        names: of all files of the repository.
        with_tokenizer: whether its tokenizer and chat template are read, too.
    """
    found = [name for name in names if name in _MODEL or _MODULES.fullmatch(name)]
    if with_tokenizer:
        found += [name for name in names if name in _TEXT or _TEMPLATES.fullmatch(name)]
        if TOKENIZER not in names:
            found += [name for name in names if is_vocabulary(name)]
    return sorted(found, key=lambda name: (name != CONFIG, name))


def files_beside(names: Collection[str], gguf: str) -> list[str]:
    """The tokenizer.json that was published beside a GGUF file, which counts instead of the file's vocabulary, with the
    files that are read for it; empty without one.

    Args:
        names: of all files of the repository.
        gguf: path of the file, or of its first part.
    """
    folder = PurePosixPath(gguf).parent
    if str(folder / TOKENIZER) not in names:
        return []
    wanted = {str(folder / name) for name in _BESIDE_GGUF}
    return sorted(name for name in names if name in wanted)


def is_vocabulary(name: str) -> bool:
    """True if a tokenizer can be built from this file, if there is no tokenizer.json."""
    return name in _VOCABULARIES or (name.endswith(_VOCABULARY_SUFFIXES) and "/" not in name)


def has_tokenizer(names: Collection[str]) -> bool:
    """True if a snapshot has files from which its tokenizer can be built."""
    return TOKENIZER in names or any(is_vocabulary(name) and name != "merges.txt" for name in names)


def is_safe_path(name: str) -> bool:
    """True if a path that the hub lists stays inside its repository."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
