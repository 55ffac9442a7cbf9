"""Adapters in host memory, ready to be copied into slots. Read beside the steps, on any thread."""

import threading
from functools import partial
from pathlib import Path
from typing import Final

import torch

from troupellm.models.adapters.adapter import Adapter, read_adapter
from troupellm.models.adapters.base_weights import BaseWeights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.errors import AdapterError
from troupellm.protocol.messages.adapters import AdapterPreparation

_STRAYS: Final = 2
"""Adapters over the limit that a worker which was started over may have read for the time before; they are dropped."""


class PreparedAdapters:
    """A bounded number of adapters, by digest."""

    def __init__(
        self,
        model: DecoderConfig,
        config: LoraConfig,
        dtype: torch.dtype,
        base: BaseWeights | None,
        *,
        whole_weights: bool = True,
        experts: bool = True,
    ) -> None:
        """
        Args:
            dtype: of slots.
            base, whole_weights, experts: as of `read_adapter`.
        """
        self._config = config
        self._read = partial(
            read_adapter,
            model=model,
            max_rank=config.max_lora_rank,
            dtype=dtype,
            base=base,
            whole_weights=whole_weights,
            experts=experts,
        )
        self._lock = threading.Lock()
        self._adapters: dict[str, Adapter] = {}

    def prepare(self, digest: str, folder: Path) -> AdapterPreparation:
        """Read an adapter, unless it is there. Never raises.

        Args:
            digest: of the files as the caller knows them.
        """
        found = self.find(digest)
        if found is None:
            try:
                found = self._read(folder)
                if found.digest != digest:
                    raise AdapterError("the adapter's files have changed meanwhile", hint="load it again")
                self._keep(found)
            except AdapterError as error:
                return AdapterPreparation(outcome="refused", error=error.message)
            except Exception as error:  # of a library over a damaged file, or for want of memory: one adapter's failure
                text = f"the adapter cannot be read: {type(error).__name__}"
                return AdapterPreparation(outcome="refused", error=text)
        return AdapterPreparation(outcome="prepared", num_bytes=found.num_bytes)

    def _keep(self, adapter: Adapter) -> None:
        with self._lock:
            most = self._config.host_adapters + _STRAYS
            if adapter.digest not in self._adapters and len(self._adapters) >= most:
                raise AdapterError(f"host memory holds {most} adapters already", hint="raise --max-cpu-loras")
            self._adapters[adapter.digest] = adapter

    def find(self, digest: str) -> Adapter | None:
        """The adapter with that digest."""
        with self._lock:
            return self._adapters.get(digest)

    def release(self, digest: str) -> None:
        """Forget an adapter; one that is not there is fine."""
        with self._lock:
            self._adapters.pop(digest, None)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._adapters.clear()
