"""One rank's part of a decoder, whose head is divided by rows of the vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.checkpoint.safetensors import WeightSource
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.decoder import Decoder
from troupellm.models.parallel.local_config import head_widths
from troupellm.models.parallel.orders import Copy, Logits
from troupellm.models.parallel.ranks import Ranks


class DividedDecoder(Decoder):
    """The layers of `local_config`. Every rank computes them together with the others; the leader has the logits."""

    def __init__(self, config: DecoderConfig, source: WeightSource, *, max_model_len: int, ranks: Ranks) -> None:
        super().__init__(config, source, max_model_len=max_model_len)
        self._ranks = ranks
        self._widths = head_widths(config.vocab_size, ranks.size)

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, add_adapters: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """As `Decoder.logits`, of the leader."""
        self._ranks.tell(Logits(hidden).encode())
        rows, vocab = hidden.shape[0], self.config.vocab_size
        found = torch.empty(rows, vocab, dtype=torch.float32) if out is None else out
        self._ranks.gather(super().logits(hidden), self._widths, found)
        if add_adapters is not None:
            add_adapters(self.normed(hidden), found)
        return found

    def give_logits(self, hidden: Tensor) -> None:
        """Compute this rank's part of the logits of hidden states [rows, hidden], for the leader."""
        self._ranks.gather(super().logits(hidden), self._widths, None)


class LeadingCache(KVCache):
    """The leader's part of the KV cache: the other ranks copy the same blocks of theirs."""

    def __init__(self, ranks: Ranks, *sizes: Any, **more: Any) -> None:
        """sizes, more: as of `KVCache`."""
        super().__init__(*sizes, **more)
        self._ranks = ranks

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """As `KVCache.copy`."""
        self._ranks.tell(Copy(pairs).encode())
        super().copy(pairs)
