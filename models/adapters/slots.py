"""Adapter slots: fixed memory for the adapters that one step may use."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from troupellm.kernels.low_rank.native import LayerWeights
from troupellm.kernels.low_rank.weights import LowRankWeights
from troupellm.models.adapters.adapter import Adapter
from troupellm.models.adapters.experts import ExpertAdapter
from troupellm.models.adapters.sites import HEAD_LAYER, decoder_sites, vocabulary_bytes
from troupellm.models.adapters.vocabulary import Vocabulary
from troupellm.models.config.decoder_config import DecoderConfig


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
        """
        Args:
            find: the adapter in host memory that has a digest; None if there is none.
        """
        self.num_slots, self._find = num_slots, find
        self._filled: set[int] = set()
        self._of_layers: LayerWeights | None = None
        self._plain, self._scaled = (np.full(num_slots + 1, plain) for plain in (True, False))
        """By number, whether a graph computes all of the slot's adapter; and whether it multiplies results."""
        self._vocabulary: dict[int, Vocabulary] = {}
        """By number. A copy of its own holds each on a device; on a CPU it is that of host memory."""
        self._experts: dict[int, dict[int, ExpertAdapter]] = {}
        """By number and layer, in host memory."""
        self._device, self._vectors = device, num_slots * vocabulary_bytes(model, max_rank, dtype.itemsize)
        self._sites = {
            (site.layer, site.name): LowRankWeights(
                num_slots, max_rank, site.in_features, [part.width for part in site.parts], dtype, device
            )
            for site in decoder_sites(model)
        }

    def site(self, layer: int, name: str) -> LowRankWeights:
        """The weights of one product, group g of slot g + 1. layer: HEAD_LAYER for the head."""
        return self._sites[layer, name]

    @property
    def of_layers(self) -> LayerWeights:
        """All sites but the head, for compiled code: of a decoder whose layers all have the four."""
        if self._of_layers is None:
            found = [weights for (layer, _), weights in self._sites.items() if layer != HEAD_LAYER]
            self._of_layers = LayerWeights(found)
        return self._of_layers

    @property
    def num_bytes(self) -> int:
        """Of full slots, but for whole weights."""
        return sum(weights.num_bytes for weights in self._sites.values()) + self._vectors

    def vocabulary(self, number: int) -> Vocabulary | None:
        """The changes of the vocabulary by the adapter in a slot; None without any."""
        return self._vocabulary.get(number)

    def experts(self, number: int, layer: int) -> ExpertAdapter | None:
        """The additions to the experts of a layer by the adapter in a slot; None without any."""
        found = self._experts.get(number)
        return None if found is None else found.get(layer)

    def fill(self, number: int, digest: str) -> bool:
        """Copy an adapter from host memory into a slot, from number 1 on; False if there is no such slot or adapter."""
        adapter = self._find(digest)
        if adapter is None or not 1 <= number <= self.num_slots:
            return False
        self._of_layers = None  # the first bias of a site is new memory
        for key, weights in self._sites.items():
            weights.clear(number - 1)
            for part, found in enumerate(adapter.sites.get(key, ())):
                if found is not None:
                    weights.put(number - 1, part, found.down, found.up, found.bias, found.factor)
        self._filled.add(number)
        self._experts[number] = adapter.experts
        self._vocabulary.pop(number, None)
        if adapter.vocabulary is not None:
            self._vocabulary[number] = adapter.vocabulary.to(self._device)
        self._scaled[number] = any(part.factor is not None for part in adapter.parts)
        of_vocabulary = adapter.vocabulary is not None or (HEAD_LAYER, "head") in adapter.sites or bool(adapter.experts)
        biased = any(part.bias is not None for part in adapter.parts)
        self._plain[number] = not (of_vocabulary or biased or self._scaled[number])
        return True

    def scales(self, numbers: NDArray[np.int64]) -> bool:
        """True if one of the slots' adapters multiplies results of products, as DoRA does."""
        return bool(self._scaled[numbers].any())

    def goes_into_graphs(self, numbers: NDArray[np.int64]) -> bool:
        """True if none of the slots' adapters has a bias, multiplies results, or changes embedding or head: no graph
        computes these."""
        return bool(self._plain[numbers].all())

    def holds(self, number: int) -> bool:
        """True if a row may use the slot; 0 is the base model."""
        return number == 0 or number in self._filled
