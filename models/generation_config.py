"""Sampling defaults that a model brings along in `generation_config.json`."""

from pathlib import Path
from typing import Any

from troupellm.models.tokenizer import read_json
from troupellm.protocol.errors import InvalidRequest, ModelLoadError
from troupellm.protocol.sampling import SamplingParams

_FIELDS = {
    # name in the file: name in SamplingParams
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def load_generation_defaults(folder: Path, mode: str) -> dict[str, Any]:
    """Defaults by `SamplingParams` field name.

    Args:
        folder: of the model; no file means no defaults.
        mode: "auto" reads the model's folder, "vllm" reads nothing, anything else is another folder to read.

    Raises:
        ModelLoadError: a value that `SamplingParams` refuses; names file and field.
    """
    if mode == "vllm":
        return {}
    source = folder if mode == "auto" else Path(mode)
    if mode != "auto" and not (source / "generation_config.json").is_file():
        raise ModelLoadError("generation_config names a folder without generation_config.json")
    settings = read_json(source / "generation_config.json")
    defaults = {ours: settings[theirs] for theirs, ours in _FIELDS.items() if settings.get(theirs) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ModelLoadError(f"generation_config.json: {error.message}") from error
    return defaults
