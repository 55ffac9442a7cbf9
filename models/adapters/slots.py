"""Adapter slots: fixed memory for the adapters that one step may use."""

from collections.abc import Callable

import torch
from torch import Tensor

from troupellm.models.adapters.adapter import Adapter, PartWeights
from troupellm.models.adapters.sites import Part, Site, decoder_sites
from troupellm.models.config.decoder_config import DecoderConfig


class SiteSlots:
    """The weights of one site in every slot.

    Attributes:
        down: [slots, parts * max_rank, in_features]; a part's matrix begins at part * max_rank, zeros behind its rank.
        ups: for each part, [slots, width, max_rank], with zeros beyond the rank.
        ranks: of each slot, the largest rank of a part; 0 where its adapter leaves this site as it is.
        bias: [slots, out_features]; None while no slot has one.
    """

    def __init__(self, site: Site, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.parts: tuple[Part, ...] = site.parts
        self.max_rank, self.out_features = max_rank, site.out_features
        self.down = torch.zeros(num_slots, len(site.parts) * max_rank, site.in_features, dtype=dtype, device=device)
        self.ups = [torch.zeros(num_slots, part.width, max_rank, dtype=dtype, device=device) for part in site.parts]
        self.ranks = [0] * num_slots
        self.bias: Tensor | None = None

    def fill(self, slot: int, parts: tuple[PartWeights | None, ...]) -> None:
        """Replace a slot's content. parts: of the adapter, none where it leaves the site as it is."""
        if self.ranks[slot]:
            for tensor in (self.down, *self.ups, *(() if self.bias is None else (self.bias,))):
                tensor[slot].zero_()
        self.ranks[slot] = max((part.down.shape[0] for part in parts if part is not None), default=0)
        for number, (weights, part) in enumerate(zip(parts, self.parts, strict=False)):
            if weights is None:
                continue
            rank, begin = weights.down.shape[0], number * self.max_rank
            self.down[slot, begin : begin + rank].copy_(weights.down)
            self.ups[number][slot, :, :rank].copy_(weights.up)
            if weights.bias is not None:
                if self.bias is None:
                    self.bias = self.down.new_zeros(self.down.shape[0], self.out_features)
                self.bias[slot, part.begin : part.begin + part.width].copy_(weights.bias)


class AdapterSlots:
    """The slots of a runner. Slot numbers begin with 1; 0 is the base model and has no memory."""

    def __init__(
        self,
        model: DecoderConfig,
        find: Callable[[str], Adapter | None],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """On a CPU the system hands out memory as slots are first written to.

        Args:
            find: the adapter in host memory that has a digest; None if there is none.
        """
        self.num_slots, self._find = num_slots, find
        self._filled: set[int] = set()
        self._sites = {
            (site.layer, site.name): SiteSlots(site, num_slots, max_rank, dtype, device)
            for site in decoder_sites(model)
        }

    def site(self, layer: int, name: str) -> SiteSlots:
        """layer: HEAD_LAYER for the head."""
        return self._sites[layer, name]

    def fill(self, number: int, digest: str) -> bool:
        """Copy an adapter from host memory into a slot, from number 1 on; False if there is no such slot or adapter."""
        adapter = self._find(digest)
        if adapter is None or not 1 <= number <= self.num_slots:
            return False
        for key, site in self._sites.items():
            site.fill(number - 1, adapter.sites.get(key, ()))
        self._filled.add(number)
        return True

    def holds(self, number: int) -> bool:
        """True if a row may use the slot; 0 is the base model."""
        return number == 0 or number in self._filled
