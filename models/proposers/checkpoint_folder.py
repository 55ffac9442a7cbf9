"""Finds a drafter's checkpoint: the one shipped with the built-in model, a local folder, or the hub."""

from pathlib import Path
from typing import Final

import msgspec

from troupellm.models.hub.model_folder import Followed
from troupellm.models.hub.source import BUILTIN_FOLDER, resolve_model
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import ProgressSink

SHIPPED: Final = "builtin"
"""As the `model` of a speculative config: the drafter that is shipped with the built-in model."""
SHIPPED_METHODS: Final = ("draft_model", "eagle", "medusa")
_DRAFTERS: Final = BUILTIN_FOLDER.parent / "drafters"


def drafter_folder(method: str, model: str | None, target: ModelConfig, progress: ProgressSink) -> Path:
    """The folder with config.json and the safetensors of a drafter. Blocks: what is on the hub is downloaded first.

    Args:
        method: of the speculative config: draft_model, eagle, eagle3 or medusa.
        model: folder or hub id; "builtin" or None: the one shipped with the built-in model.
        target: the model that is drafted for; hub settings (token, cache) are taken from it.
        progress: is told of downloads.

    Raises:
        ModelLoadError: there is no such drafter, or it could not be fetched.
    """
    if model is not None and model != SHIPPED:
        wanted = msgspec.structs.replace(target, model=model, revision=None, tokenizer=None, load_format="auto")
        return resolve_model(wanted, progress)
    if not _is_builtin(target):
        raise ModelLoadError(
            f"speculative_config: no {method} drafter is shipped for {target.model}",
            hint='name one: "model": a folder or a hub id; those that are shipped fit the built-in model only',
        )
    if method not in SHIPPED_METHODS:
        raise ModelLoadError(
            f"speculative_config: no {method} drafter is shipped with the built-in model",
            hint=f"method is one of {', '.join(SHIPPED_METHODS)}, or name a folder as model",
        )
    folder = Followed(_DRAFTERS / method)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"the built-in model's {method} drafter is missing from this installation", hint="install troupellm again"
        )
    return folder


def _is_builtin(target: ModelConfig) -> bool:
    return target.model is None or Path(target.model).expanduser().resolve() == BUILTIN_FOLDER.resolve()
