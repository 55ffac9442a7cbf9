"""A smaller model with the same tokenizer drafts for the larger one (Leviathan, Kalman and Matias, 2023)."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from troupellm.kernels.common.batch_invariance import batch_invariant
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder, is_encoder
from troupellm.models.layers.attention import KVPair
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.models.layers.cache_layout import cache_layout, with_cache_groups
from troupellm.models.layers.decoder import Decoder
from troupellm.models.layers.forward_batch import ForwardBatch
from troupellm.models.load.architecture import read_config
from troupellm.models.load.read_decoder import read_decoder, stored_format
from troupellm.models.load.tied_head import settle_head
from troupellm.models.memory.drafter_needs import MARK_NUMBERS, DrafterNeeds, Target
from troupellm.models.memory.plan import MemoryBudget, own_limit
from troupellm.models.memory.stored_size import stored_size
from troupellm.models.memory.weight_bytes import weight_bytes
from troupellm.models.proposers.base import Proposer
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.models.proposers.load import Context, paged, target_of
from troupellm.models.proposers.paged_attention import own_windows
from troupellm.models.proposers.stored_drafters import reading, refuse
from troupellm.models.tokenizer.served import tokenizer_folder
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ModelLoadError


class DraftModel:
    """A `Network` that reads tokens."""

    aux_hidden_states = AuxHiddenStates(tokens=True)
    reads_states = False
    vocabulary: Tensor | None = None

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.width = decoder, decoder.config.hidden_size
        self._last = decoder.config.vocab_size - 1

    def states(self, aux: Tensor) -> Tensor:
        """As `Network.states`; never called."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, states: Tensor | None, caches: list[KVPair]) -> Tensor:
        """As `Network.forward`."""
        # Rows of logits that are no tokens need not be as many as the target's.
        return self._decoder.forward(replace(batch, token_ids=batch.token_ids.clamp(max=self._last)), caches)

    def scores(self, states: Tensor) -> Tensor:
        """As `Network.scores`."""
        return self._decoder.logits(states)


def requirements(config: SpeculativeConfig, target: Target) -> DrafterNeeds:
    """The memory needs of the draft model.

    Raises:
        ModelLoadError: it cannot draft for the target; the message names the reason.
    """
    folder = _folder(config, target)
    reader, model = _described(folder, target)
    form = stored_format(folder, reader, reading(config, target))
    stored = stored_size(folder, model, form, target.dtype, target.device)
    weights = weight_bytes(model, target.dtype, target.device, config.quantization, stored)
    return DrafterNeeds(weight_bytes=weights, layers=model, width=model.hidden_size, border=MARK_NUMBERS)


def make(config: SpeculativeConfig, context: Context) -> Proposer:
    """Read the draft model.

    Raises:
        ModelLoadError: it cannot draft for the target; says why.
    """
    target = target_of(context)
    folder = _folder(config, target)
    reader, model = _described(folder, target)
    _check_vocabulary(folder, target)
    longest = min(target.max_model_len, own_limit(model), config.max_model_len or target.max_model_len)
    budget = MemoryBudget(
        weight_bytes=0, activation_bytes=0, kv_cache_bytes=0, free_bytes=0, num_blocks=0, max_model_len=longest
    )
    settings = reading(config, target)
    form = stored_format(folder, reader, settings)
    device = context.cache.storage.device
    with batch_invariant(context.decoder.batch_invariant):
        decoder = read_decoder(folder, model, form, settings, target.dtype, budget, lambda _: None, device)
    assert isinstance(decoder, Decoder)
    return paged(DraftModel(decoder), model, config, context, longest)


def _folder(config: SpeculativeConfig, target: Target) -> Path:
    return drafter_folder("draft_model", config.model, target.model, lambda _: None)


def _described(folder: Path, target: Target) -> tuple[ConfigReader, DecoderConfig]:
    reader = read_config(folder).reader
    if is_encoder(reader):
        raise refuse(f"model {folder.name} is an encoder, which does not write", "name a smaller model that does")
    described = settle_head(folder, describe_decoder(reader), lambda _: None)
    if described.head != "lm":
        raise refuse(f"model {folder.name} does not write", "name a smaller model with a head of its vocabulary")
    model = with_cache_groups(described, own_limit(described), hybrid=False)
    return reader, model.with_layers(window=own_windows(model, cache_layout(target.config)))


def _check_vocabulary(folder: Path, target: Target) -> None:
    """A token must mean the same to both."""
    theirs = tokenizer_folder(target.folder, target.model)
    if folder.resolve() == theirs.resolve():
        return
    try:
        own = Tokenizer.load(folder).vocabulary()
    except ModelLoadError as error:
        raise refuse(f"the tokenizer of model {folder.name} cannot be compared: {error.message}") from error
    wanted = Tokenizer.load(theirs).vocabulary()
    if own == wanted:
        return
    token = min(
        (token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token)),
        key=lambda token: min(own.get(token, 2**40), wanted.get(token, 2**40)),
    )
    raise refuse(
        f"model {folder.name} has another tokenizer than the target: {token!r} is {own.get(token)} there, "
        f"{wanted.get(token)} here",
        "name a smaller model of the same family",
    )
