"""The chat templates of a model's folder, in the order of `transformers`, and the one that a setting names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troupellm.models.config.model_documents import read_json
from troupellm.models.hub.model_folder import check_file
from troupellm.models.tokenizer.tokenizer import token_text
from troupellm.protocol.errors import ModelLoadError

DEFAULT = "default"
_CONFIG = "tokenizer_config.json"
_LOOKS_LIKE_TEXT = ("{{", "{%", "{#", "\n")


def read_templates(
    folder: Path, override: str | None, special_tokens: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Templates by name, and the texts of special tokens by the names that templates use.

    Args:
        folder: of the model, or its GGUF file.
        override: a file, the name of one of the model's templates, or the text of a template; None is the model's own.
        special_tokens: names to look for.

    Raises:
        ModelLoadError: names the file that cannot be read, or a template that is not there.
    """
    config = read_json(folder / _CONFIG)
    tokens = {name: text for name in special_tokens if (text := token_text(config.get(name))) is not None}
    if override is not None and any(mark in override for mark in _LOOKS_LIKE_TEXT):
        return {DEFAULT: override}, tokens
    if override is not None and Path(override).is_file():
        return {DEFAULT: _read(Path(override))}, tokens
    templates = _of_folder(folder, config)
    if override is None:
        return templates, tokens
    if override not in templates:
        names = ", ".join(sorted(templates)) or "none"
        raise ModelLoadError(
            f"chat_template {override!r} is no file, no template text and no template of the model (it has: {names})",
            hint="--chat-template takes a file, one of these names, or the text of a template",
        )
    return {**templates, DEFAULT: templates[override]}, tokens


def _of_folder(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files of templates replace those of tokenizer_config.json whole; chat_template.json is the oldest form."""
    found: dict[str, str] = {}
    file = folder / "chat_template.jinja"
    check_file(file)
    if file.is_file():
        found[DEFAULT] = _read(file)
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        check_file(extra, folder)
        found[extra.stem] = _read(extra)
    if found:
        return found
    for name, settings in ((_CONFIG, config), ("chat_template.json", read_json(folder / "chat_template.json"))):
        if settings.get("chat_template") is not None:
            return _named(name, settings["chat_template"])
    return {}


def _named(file: str, entry: Any) -> dict[str, str]:
    """A text, or a list of named texts."""
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if isinstance(entry, list):
        pairs = [(item.get("name"), item.get("template")) for item in entry if isinstance(item, dict)]
        named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
        if len(named) == len(entry):
            return named
    raise ModelLoadError(f"{file}: chat_template must be a text or a list of named templates")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"chat template {path.name} cannot be read") from error
