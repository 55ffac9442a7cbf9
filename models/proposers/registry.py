"""Proposers by the name of their method, and plug-ins.

A plug-in is a class with the methods of `troupellm.Proposer`, made as `kind(config, context)`. It is named by
`custom_class`: `module:Class`, or a name under which it is installed in the entry point group `troupellm.proposers`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.proposers.base import Proposer
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError, TroupeError

GROUP: Final = "troupellm.proposers"
MODULES: Final = {
    "ngram": "troupellm.models.proposers.ngram",
    "suffix": "troupellm.models.proposers.suffix",
    "draft_model": "troupellm.models.proposers.draft_model",
    "eagle": "troupellm.models.proposers.eagle",
    "eagle3": "troupellm.models.proposers.eagle3",
    "medusa": "troupellm.models.proposers.medusa",
    "mtp": "troupellm.models.proposers.mtp",
}
"""Each module has `make(config, context) -> Proposer`."""
_CALLS: Final = ("add_row", "drop_row", "observe", "propose", "reset")
_LONGEST_REASON: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerContext:
    """The parts of the worker that a proposer may use."""

    decoder: RunnableDecoder
    """The model whose tokens are guessed: embeddings and head are its own."""
    cache: KVCache
    folder: Path
    """Folder of the model's checkpoint."""
    model: ModelConfig
    """Settings with which the model is read."""
    dtype: torch.dtype
    """Type of activations."""
    max_model_len: int
    max_num_seqs: int
    """Most rows of a step."""


def make_proposer(config: SpeculativeConfig, context: ProposerContext) -> Proposer:
    """The proposer of a given method.

    Raises:
        ConfigError: a plug-in of that name is not installed, or `custom_class` is not understood.
        ModelLoadError: it cannot be made, or is no proposer.
    """
    if config.method == "custom":
        return _custom(config, context)
    if config.method is None:
        raise ValueError("the method is not told yet")
    module = import_module(MODULES[config.method])
    proposer: Proposer = module.make(config, context)
    return proposer


def _custom(config: SpeculativeConfig, context: ProposerContext) -> Proposer:
    name = config.custom_class or ""
    load = _loader(name)
    try:
        proposer = load()(config, context)
    except TroupeError:
        raise  # its message is complete already
    except Exception as error:  # a plug-in may raise anything
        reason = str(error)[:_LONGEST_REASON] or type(error).__name__
        raise ModelLoadError(f"the proposer {name} cannot be loaded: {reason}") from error
    missing = [call for call in _CALLS if not callable(getattr(proposer, call, None))]
    if missing:
        raise ModelLoadError(f"{name} is no proposer: it has no {', '.join(missing)}")
    if not isinstance(getattr(proposer, "aux_hidden_states", None), AuxHiddenStates):
        raise ModelLoadError(f"{name} is no proposer: its aux_hidden_states must be an object of AuxHiddenStates")
    found: Proposer = proposer
    return found


def _loader(name: str) -> Callable[[], Any]:
    """A function that imports a class.

    Raises:
        ConfigError: it is neither `module:Class` nor installed.
    """
    module, colon, path = name.partition(":")
    if colon and module and path:
        return lambda: getattr(import_module(module), path)
    installed = {point.name: point.load for point in entry_points(group=GROUP)}
    if name not in installed:
        there = ", ".join(sorted(installed)) or "none"
        raise ConfigError(
            f"speculative_config: custom_class must be module:Class or an installed plug-in ({there}), got {name!r}",
            param="speculative_config.custom_class",
        )
    return installed[name]
