"""Loads a model's tokenizer and checks that it fits: every token of a text must have a row in the model's embedding.

Two kinds of token may lack a row. Tokens for images, audio and video: some families share a tokenizer between models
with and without vision. Tokens that are never added to a prompt here: padding, unknown text, borders and gaps, which
some tokenizers got later. A prompt that contains such a token is refused.
"""

from pathlib import Path
from typing import Any

from troupellm.models.config.hf_config import ConfigReader, whole
from troupellm.models.config.model_documents import read_json
from troupellm.models.config.text_section import text_values
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.source import resolve_model
from troupellm.models.tokenizer.tokenizer import Tokenizer, known_ends, token_text
from troupellm.models.tokenizer.tokenizer_trial import check_trial
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

_SPARED = (
    "image_token", "audio_token", "video_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip
_HINT = "use the tokenizer that belongs to the model; --tokenizer names another folder"
_SHOWN = 80


def _silent(progress: LoadProgress) -> None:
    """Has no record of files fetched before."""


def tokenizer_folder(folder: Path, config: ModelConfig, progress: ProgressSink = _silent) -> Path:
    """Where the tokenizer of the model in `folder` is read.

    Raises:
        ModelLoadError: it is elsewhere, and cannot be fetched.
    """
    if config.tokenizer is None:
        return folder
    elsewhere = ModelConfig(
        model=config.tokenizer,
        download_dir=config.download_dir,
        hf_token=config.hf_token,
        allow_model_links=config.allow_model_links,
        load_format="dummy",  # its weights are not read
    )
    return resolve_model(elsewhere, progress)


def load_tokenizer(folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer that a model is served with."""
    return Tokenizer.load(tokenizer_folder(folder, config))


def check_fit(tokenizer: Tokenizer, folder: Path, home: Path, rows: int | None) -> None:
    """Refuse a tokenizer that loses text, or that says more than the model knows.

    Args:
        folder: of the model, or its GGUF file.
        home: where the tokenizer was read.
        rows: of the embedding; None is as many as config.json says, and where that says nothing there is no check.

    Raises:
        ModelLoadError: an id has no row; names the file, the token and the id.
    """
    file = home.name if is_gguf(home) else "tokenizer.json"
    check_trial(tokenizer, file)
    rows = _known_rows(folder) if rows is None else rows
    if rows is None:
        return
    _check_tokens(tokenizer, home, file, rows)
    name, ends = known_ends(home)
    for number in ends:
        if number >= rows:
            raise ModelLoadError(
                f"{name}: eos_token_id {number} is beyond the model's embedding, which has {rows} rows", hint=_HINT
            )
    for number in _around(tokenizer, file):
        if number >= rows:
            raise ModelLoadError(
                f"{file}: every prompt gets the id {number}, but the model's embedding has {rows} rows",
                hint=_HINT,
            )


def fit_notes(tokenizer: Tokenizer, rows: int) -> list[str]:
    """That the embedding has many rows without a token: the tokenizer may belong to another model.

    Args:
        rows: of the embedding.
    """
    count = len(tokenizer.vocabulary())
    if 2 * count >= rows:
        return []
    return [f"the tokenizer has {count} tokens for {rows} rows of the embedding; it may be that of another model"]


def _around(tokenizer: Tokenizer, file: str) -> list[int]:
    """The special tokens that every prompt gets."""
    try:
        return tokenizer.encode("", add_special_tokens=True)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{file}: not even an empty text can be encoded: {error}") from error


def _check_tokens(tokenizer: Tokenizer, home: Path, file: str, rows: int) -> None:
    if tokenizer.size <= rows:
        return
    spared = _placeholders(read_json(home / "tokenizer_config.json"))
    beyond = sorted(
        (number, text) for text, number in tokenizer.vocabulary().items() if number >= rows and text not in spared
    )
    if beyond:
        number, text = beyond[0]
        more = f" and {len(beyond) - 1} more have greater ones" if len(beyond) > 1 else ""
        raise ModelLoadError(
            f"{file}: token {text[:_SHOWN]!r} has the id {number}{more}, but the model's embedding has {rows} rows",
            hint=_HINT,
        )


def _placeholders(settings: dict[str, Any]) -> frozenset[str]:
    extra = settings.get("extra_special_tokens")
    places = [settings, extra] if isinstance(extra, dict) else [settings]
    found = (token_text(place.get(name)) for place in places for name in _SPARED)
    return frozenset(text for text in found if text is not None)


def _known_rows(folder: Path) -> int | None:
    for place in text_values(ConfigReader.load(folder).values):
        rows = whole(place.get("vocab_size"))
        if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0:
            return rows
    return None
