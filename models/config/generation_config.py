"""Sampling defaults: those of the model's `generation_config.json`, and the operator's changes to them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from troupellm.models.config.hf_config import is_on, whole
from troupellm.models.config.model_documents import read_json
from troupellm.protocol.errors import ConfigError, InvalidRequest, ModelLoadError
from troupellm.protocol.params.sampling import SamplingParams

Overrides = Mapping[str, Any] | str | None

_FIELDS = {
    # name in the file: name in SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "skip_special_tokens": "skip_special_tokens",
    "max_new_tokens": "max_tokens",
}
_WHOLE = ("top_k", "max_new_tokens")
_OFF_AT_ZERO = ("repetition_penalty", "max_new_tokens")
_GREEDY_TOP_P = 1e-9
"""`top_p` 0 keeps the most probable token alone, as in transformers; here the least value is above 0."""


def load_generation_defaults(
    folder: Path, mode: str, overrides: Mapping[str, Any] | str | None = None
) -> dict[str, Any]:
    """Defaults by `SamplingParams` field name.

    Args:
        folder: of the model; no file means no defaults.
        mode: "auto" reads the model's folder, "vllm" reads nothing, anything else is another folder to read.
        overrides: settings over those, with the file's names; a mapping or its JSON.

    Raises:
        ModelLoadError: a value that `SamplingParams` refuses; names file and field.
        ConfigError: overrides that are no such settings.
    """
    settings: dict[str, Any] = {}
    if mode != "vllm":
        source = folder if mode == "auto" else type(folder)(mode)  # whose links are followed alike
        if mode != "auto" and not (source / "generation_config.json").is_file():
            raise ModelLoadError("generation_config names a folder without generation_config.json")
        settings = read_json(source / "generation_config.json")
    try:
        defaults = _checked(settings)
    except InvalidRequest as error:
        raise ModelLoadError(f"generation_config.json: {error.message}") from error
    try:
        return defaults | _checked(read_overrides(overrides))
    except InvalidRequest as error:
        raise ConfigError(f"override_generation_config: {error.message}", param="override_generation_config") from error


def read_overrides(overrides: Overrides) -> dict[str, Any]:
    """
    Raises:
        ConfigError: not a JSON object, or a setting that means nothing here.
    """
    name = "override_generation_config"
    if isinstance(overrides, str):
        try:
            overrides = msgspec.json.decode(overrides)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name} is not JSON: {error}", param=name) from None
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"{name} must be a JSON object", param=name)
    unknown = sorted(overrides.keys() - _FIELDS.keys())
    if unknown:
        raise ConfigError(f"{name} has {unknown[0]}; it may have {', '.join(_FIELDS)}", param=name)
    return dict(overrides)


def token_cap(overrides: Overrides) -> int | None:
    """Most tokens that any sequence gets, where the operator has said so."""
    most = read_overrides(overrides).get("max_new_tokens")
    return most if isinstance(most, int) else None


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {}
    for theirs, ours in _FIELDS.items():
        value = settings.get(theirs)
        if value is None or value == "" or (theirs in _OFF_AT_ZERO and not is_on(value)):
            continue
        defaults[ours] = whole(value) if theirs in _WHOLE else value
    if defaults.get("top_p") == 0:
        defaults["top_p"] = _GREEDY_TOP_P
    SamplingParams(**defaults)
    return defaults
