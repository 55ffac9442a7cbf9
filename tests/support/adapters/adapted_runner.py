"""Adapters of a small model in the slots of a runner."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from troupellm.models.adapters.adapter import Adapter, read_adapter
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.protocol.messages.worker import AdapterSlot
from troupellm.tests.support.adapters.peft_folders import write_adapter
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "two": {"names": ("q_proj", "v_proj"), "rank": 4},
    "all": {"rank": 8, "use_rslora": True},
    "patterns": {"names": ("o_proj", "up_proj", "down_proj"), "rank": 3, "rank_pattern": {"up_proj": 6}},
    "biases": {"names": ("k_proj", "gate_proj", "down_proj"), "rank": 2, "lora_bias": True},
    "head": {"names": ("lm_head", "gate_proj"), "rank": 5},
}


class Adapters:
    """One adapter of each kind. Slots have them in that order, unless told otherwise."""

    def __init__(self, folder: Path, model: DecoderConfig, kinds: Mapping[str, dict[str, Any]] = KINDS) -> None:
        self.model, self.tensors, self.by_name = model, dict[str, dict[str, Tensor]](), dict[str, Adapter]()
        for seed, (name, settings) in enumerate(kinds.items()):
            self.tensors[name] = write_adapter(folder / name, model, seed=seed, **settings)
            self.by_name[name] = read_adapter(folder / name, model, 8)
        self.names = list(kinds)

    def slots(self, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> AdapterSlots:
        by_digest = {adapter.digest: adapter for adapter in self.by_name.values()}
        return AdapterSlots(
            self.model, by_digest.get, num_slots=len(self.names), max_rank=8, dtype=dtype, device=device
        )

    def changes(self, *names: str) -> tuple[AdapterSlot, ...]:
        """These adapters in slots from 1 on."""
        return tuple(AdapterSlot(slot, self.by_name[name].digest) for slot, name in enumerate(names, 1))

    def driver(self, pair: Pair, *names: str, **more: Any) -> Driver:
        """A runner with these adapters in its slots, all of them if none is named."""
        driver = Driver(pair.runner(adapters=self.slots(), **more))
        driver.slots = self.changes(*(names or self.names))
        return driver

    def slot(self, name: str) -> int:
        """Where all adapters are in slots; "" is the base model."""
        return 1 + self.names.index(name) if name else 0
