"""Chooses the drafter of a model before it is loaded, with the properties that the rest of the worker needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader, rope_section
from troupellm.models.load.fingerprint import checkpoint_digest
from troupellm.models.memory.drafter_needs import NO_DRAFTER, DrafterNeeds, Target
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import ProgressSink


@dataclass(frozen=True, slots=True)
class Drafting:
    """Decisions about drafting that are made before any weights are read."""

    config: SpeculativeConfig | None = None
    """With its method; None if there is no drafting."""
    needs: DrafterNeeds = NO_DRAFTER
    folder: Path | None = None
    """Checkpoint of a drafter whose keys and values lie in the model's blocks, if it has a separate one."""

    @property
    def drafts_itself(self) -> bool:
        """True if the model's own layers for multi-token prediction draft."""
        return self.config is not None and self.config.method == "mtp"

    def digests(self, longest: int) -> Sequence[str]:
        """Digests of the drafter's files, on which the content of blocks depends beside the model; reads the files.

        Args:
            longest: served length in tokens, by which some drafters rotate their keys.

        Raises:
            ModelLoadError: a file is missing, or is not in the folder.
            OSError: a file cannot be read.
        """
        if self.config is None or self.needs.layers is None:
            return ()
        if self.folder is None:
            return str(self.config.method), str(self.needs.border)
        return (
            str(self.config.method),
            str(self.needs.border),
            str(self.config.quantization),
            checkpoint_digest(self.folder),
            _length(self.folder, longest),
        )


def _length(folder: Path, longest: int) -> str:
    """The served length, where the rotation of keys depends on it."""
    reader = ConfigReader.load(folder)
    scaling = rope_section(reader).values
    return str(longest) if {scaling.get("rope_type"), scaling.get("type")} & {"dynamic", "longrope", "su"} else ""


def plan_drafting(
    config: EngineConfig,
    folder: Path,
    model: DecoderConfig,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressSink,
) -> Drafting:
    """
    Args:
        folder: of the model.
        model: as it is run, cache groups included.
        longest: tokens of a sequence, at most.

    Raises:
        ModelLoadError: there is no such drafter, or it does not fit the model.
        ConfigError: the model does not write, or the device does not verify.
    """
    wanted = config.speculation.speculative_config
    if wanted is None:
        return Drafting()
    if model.head != "lm" or config.model.runner == "pooling":
        raise ConfigError("speculative_config is for models that write", param="speculative_config")
    if wanted.tree_widths and any(shape.chunk is not None for shape in model.layers):
        raise ConfigError(
            "speculative_config: tree_widths are not for a model that attends in chunks; leave them out, or set "
            "max_model_len to the length of a chunk",
            param="speculative_config.tree_widths",
        )
    from troupellm.models.proposers.checkpoint_folder import drafter_folder
    from troupellm.models.speculation.requirements import drafter_needs, settle

    settled = settle(wanted, config.model, progress)
    if device.type != "cpu" and settled.tree_widths and model.mla is not None:
        raise ConfigError(
            "speculative_config: tree_widths for a model with latent attention are for the device cpu; on "
            f"{device.type} leave them out: every method drafts chains",
            param="speculative_config.tree_widths",
        )
    target = Target(folder=folder, model=config.model, config=model, dtype=dtype, device=device, max_model_len=longest)
    needs = drafter_needs(settled, target)
    own = None
    if settled.method in ("draft_model", "eagle", "eagle3"):
        own = drafter_folder(settled.method, settled.model, config.model, progress)
    return Drafting(settled, needs, own)
