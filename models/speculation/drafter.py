"""The proposer of a worker: made once and used as long as its model and cache exist."""

from itertools import accumulate
from pathlib import Path
from secrets import randbits
from typing import Final

import msgspec
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.batch.row_table import RowTable
from troupellm.models.layers.decoder import RunnableDecoder
from troupellm.models.proposers.base import Proposer, Reporting, Sleeper
from troupellm.models.proposers.plugin import Guarded
from troupellm.models.speculation.draft_length import DraftLength
from troupellm.models.speculation.plan import Drafting
from troupellm.models.speculation.speculator import MakeSpeculator, Options, Speculator
from troupellm.models.speculation.synthetic_acceptance import SyntheticAcceptance
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.worker import StepResult

_LIFE_BITS: Final = 62


class Drafter:
    """Makes a speculator for every new runner. Proposers keep their learned state between runners."""

    def __init__(
        self, drafting: Drafting, config: EngineConfig, folder: Path, dtype: torch.dtype, max_model_len: int
    ) -> None:
        """
        Args:
            folder: of the model.
            dtype: of activations.
        """
        self._config, self._engine, self._folder, self._dtype = drafting.config, config, folder, dtype
        self._max_model_len = max_model_len
        self._made: tuple[RunnableDecoder, KVCache, Proposer, DraftLength | None] | None = None
        self._reporter: Reporting | None = None
        self._reported: ProposerReport | None = None
        self._life = 0
        self.most = 0
        """Most drafts of a row in a step, once a proposer was made; 0 if there is no drafting."""

    def speculation(self, decoder: RunnableDecoder, cache: KVCache) -> dict[str, MakeSpeculator]:
        """Keyword arguments for a runner of this decoder and cache; empty if there is no drafting.

        Raises:
            ModelLoadError: the proposer cannot be made.
            ConfigError: a plug-in is not there.
        """
        wanted = self._config
        if wanted is None:
            return {}
        if self._made is None or self._made[0] is not decoder or self._made[1] is not cache:
            proposer = self._make(wanted, decoder, cache)
            self.most = min(wanted.most_drafts, getattr(proposer, "most", wanted.most_drafts))
            self._made = decoder, cache, proposer, _length(wanted, self.most, proposer)
            self._reporter = proposer if isinstance(proposer, Reporting) else None
            self._life = randbits(_LIFE_BITS)
        self._reported = None  # results of the runner before may have been lost
        proposer, length = self._made[2:]
        most = self.most
        synthetic = None
        if wanted.synthetic_acceptance_length is not None:
            synthetic = SyntheticAcceptance(wanted.synthetic_acceptance_length, most)

        def make(rows: RowTable, options: Options, guides: GuidedRows | None) -> Speculator:
            return Speculator(
                proposer,
                rows,
                options,
                decoder.config.vocab_size,
                most=most,
                length=length,
                synthetic=synthetic,
                guides=guides,
                trees=_sees_trees(decoder, cache),
            )

        return {"speculation": make}

    def forget(self) -> None:
        """Release the proposer and its memory."""
        self._made = self._reporter = None

    def reported(self, result: StepResult) -> StepResult:
        """Add the proposer's report to a result if it has changed."""
        if self._reporter is None:
            return result
        report = self._reporter.report()
        if report == self._reported:
            return result
        self._reported = report
        return msgspec.structs.replace(result, proposer=msgspec.structs.replace(report, life=self._life))

    def _make(self, wanted: SpeculativeConfig, decoder: RunnableDecoder, cache: KVCache) -> Proposer:
        from troupellm.models.proposers.registry import ProposerContext, make_proposer

        proposer = make_proposer(
            wanted,
            ProposerContext(
                decoder=decoder,
                cache=cache,
                folder=self._folder,
                model=self._engine.model,
                dtype=self._dtype,
                max_model_len=self._max_model_len,
                max_num_seqs=self._engine.scheduler.max_num_seqs,
            ),
        )
        if wanted.method != "custom":
            return proposer
        trees = _sees_trees(decoder, cache)
        return Guarded(str(wanted.custom_class), proposer, decoder.config.vocab_size, trees=trees)


def _sees_trees(decoder: RunnableDecoder, cache: KVCache) -> bool:
    """True if the attention has masks for trees of drafts."""
    chunks = any(shape.chunk is not None for shape in decoder.config.layers)
    return not chunks and (cache.storage.device.type == "cpu" or decoder.config.mla is None)


def _length(wanted: SpeculativeConfig, most: int, proposer: Proposer) -> DraftLength | None:
    """The controller of the number of drafts; None if each row always gets all of them."""
    if not wanted.adaptive:
        return None
    levels = list(accumulate(wanted.tree_widths)) or range(1, most + 1)
    return DraftLength(levels, sleeps=proposer.aux_hidden_states.wanted and isinstance(proposer, Sleeper))
