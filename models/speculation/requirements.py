"""Before a model is loaded: settles its drafter and the drafter's memory needs."""

from importlib import import_module
from typing import Final

import msgspec

from troupellm.models.memory.drafter_needs import NO_DRAFTER, DrafterNeeds, Target
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.models.proposers.registry import MODULES
from troupellm.models.proposers.stored_drafters import method_of
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.worker import ProgressSink

MODELS: Final = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""Methods with weights; the module of each has `requirements(config, target)`."""


def settle(config: SpeculativeConfig, target: ModelConfig, progress: ProgressSink) -> SpeculativeConfig:
    """The same with its method, told from its checkpoint where nothing else says it. Blocks: what is on the hub is
    downloaded.

    Raises:
        ModelLoadError: there is no such drafter, or it could not be fetched.
    """
    if config.method not in (None, "draft_model", "eagle", "eagle3", "medusa"):
        return config
    folder = drafter_folder(config.method or "draft_model", config.model, target, progress)
    return config if config.method is not None else msgspec.structs.replace(config, method=method_of(folder))


def drafter_needs(config: SpeculativeConfig, target: Target) -> DrafterNeeds:
    """A drafter's needs beside the model; reads its headers, not its tensors.

    Args:
        config: from `settle`.

    Raises:
        ModelLoadError: it does not fit the target; the message names the reason.
    """
    if config.method not in MODELS:
        return NO_DRAFTER
    needs: DrafterNeeds = import_module(MODULES[config.method]).requirements(config, target)
    return needs
