"""The settings for a worker, which gets no token of the hub: what they name there is named by its files here."""

from pathlib import Path
from typing import Final

import msgspec

from troupellm.models.proposers.checkpoint_folder import SHIPPED, drafter_folder
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import ProgressSink

_WITH_WEIGHTS: Final = (None, "draft_model", "eagle", "eagle3", "medusa")
"""Methods whose drafter is a checkpoint of its own; None is told from the checkpoint."""


def with_local_names(config: EngineConfig, home: Path, progress: ProgressSink) -> EngineConfig:
    """The same with the drafter and the tokenizer named by their folders. Blocks: a drafter of the hub is downloaded.

    Args:
        home: where the tokenizer was found.

    Raises:
        ModelLoadError: there is no such drafter, or it could not be fetched.
    """
    model, speculation = config.model, config.speculation
    if model.tokenizer is not None:
        model = msgspec.structs.replace(model, tokenizer=str(home))
    drafts = speculation.speculative_config
    if drafts is not None and drafts.method in _WITH_WEIGHTS and drafts.model not in (None, SHIPPED):
        folder = drafter_folder(drafts.method or "draft_model", drafts.model, config.model, progress)
        drafts = msgspec.structs.replace(drafts, model=str(folder))
        speculation = msgspec.structs.replace(speculation, speculative_config=drafts)
    return msgspec.structs.replace(config, model=model, speculation=speculation)
