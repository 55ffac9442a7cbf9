"""Additions to the workload of some of the seeds: LoRA adapters, which are found, loaded, replaced and unloaded.

Drawn apart, so that a seed without them stays what it was. An adapter changes every token of an answer, and the KV of
every position with it. Its folder names its version; the worker computes with what lies in its slots.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from simulator.faults import ADAPTER_FAULTS, Fault
from simulator.multipliers import draw_whole
from simulator.workload import UNKNOWN, Ask, Scenario
from troupellm.actors.adapters.actor import PARALLEL_LOADS, AdapterSources, Inspected
from troupellm.actors.adapters.registry import AdapterRegistry
from troupellm.actors.engine.adapter_sources import ask_library
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.adapter_library import AddAdapter, RemoveAdapter
from troupellm.protocol.messages.adapters import AdapterPreparation
from troupellm.protocol.messages.worker import AdapterSlot

if TYPE_CHECKING:
    from simulator.world import World

ADAPTED_SHARE = 0.3
_NAMES = ("a", "b", "c", "d")


def draw_adapted(seed: int) -> Scenario:
    """A seed with adapters, where it has them."""
    scenario, random = draw_whole(seed), Random(seed ^ 0x10A)
    if scenario.pressure.torch or random.random() >= ADAPTED_SHARE:
        return scenario
    return adapted(scenario, random)


def adapted(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario, some of whose requests name an adapter."""
    slots = random.choice((1, 1, 2, 3))
    lora = LoraConfig(enable_lora=True, max_loras=slots, max_cpu_loras=slots + random.choice((0, 0, 1, 3)))
    config = msgspec.structs.replace(scenario.config, lora=lora)
    pressure = msgspec.structs.replace(scenario.pressure, loras=slots)
    asks = tuple(_naming(random, ask) for ask in scenario.asks)
    num_faults = random.choice((0, 0, 1, 2)) if scenario.faults else 0
    faults = (*scenario.faults, *(_draw_fault(random) for _ in range(num_faults)))
    return msgspec.structs.replace(scenario, config=config, pressure=pressure, asks=asks, faults=faults)


def _naming(random: Random, ask: Ask) -> Ask:
    name = random.choice(("", *_NAMES, *_NAMES)) if random.random() < 0.95 else UNKNOWN
    return msgspec.structs.replace(ask, adapter="" if ask.calm and name == UNKNOWN else name)


def _draw_fault(random: Random) -> Fault:
    kind = random.choice(ADAPTER_FAULTS)
    span = random.choice((1, 2)) if kind == "delay" else 1
    return Fault("adapters", kind, random.choice((1, 1, 2, 3)), span, random.choice((0.02, 0.5)))


class SimAdapters:
    """The adapters of the worker: those in host memory, and those in its slots."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._host: set[str] = set()
        self._slots: dict[int, str] = {}
        self.most_host = 0
        """That host memory may hold; 0: any number. A worker that was started over may have a few more for a while."""

    def prepare(self, digest: str, folder: str) -> AdapterPreparation:
        if digest != _digest(folder):
            self._report(f"the worker is to read {digest} from {folder}")
        self._host.add(digest)
        if self.most_host and len(self._host) > self.most_host + PARALLEL_LOADS:
            self._report(f"host memory holds {len(self._host)} adapters, {self.most_host} are allowed")
        return AdapterPreparation(outcome="prepared", num_bytes=1)

    def release(self, digest: str) -> None:
        self._host.discard(digest)

    def change(self, slots: Iterable[AdapterSlot]) -> None:
        """With a plan."""
        for change in slots:
            if change.digest not in self._host:
                self._report(f"slot {change.slot} is to get {change.digest}, which was not read")
            self._slots[change.slot] = change.digest

    def held(self, slot: int) -> str:
        """The digest of what is in a slot."""
        return self._slots.get(slot, "")

    def forget(self) -> None:
        self._host.clear()
        self._slots.clear()


class QuietPool:
    """Threads on which nothing breaks."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        await anyio.sleep(0.01 * self._random.choice((0.0, 1.0, 5.0)))
        return function(*args)


class SimResolver:
    """Finds the first version of each adapter, after a while."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def resolve(self, name: str) -> Path | None:
        await anyio.sleep(self._random.choice((0.0, 0.01, 0.3)))
        return Path("/", name, "1") if name in _NAMES else None


def adapter_sources(random: Random) -> AdapterSources:
    return AdapterSources(
        registry=AdapterRegistry(["model"]),
        resolvers=[SimResolver(random)],
        inspect=lambda folder: Inspected(digest=_digest(folder), rank=1, num_bytes=1),
        parent="model",
        most_searches=8,
    )


async def reload_adapters(world: "World") -> None:
    """An operator loads, replaces and unloads adapters while requests come."""
    random = Random(world.scenario.seed ^ 0x10AD)
    for _ in range(random.choice((0, 0, 3, 8))):
        await anyio.sleep(random.choice((0.0, random.uniform(0.0, 0.3))))
        name = random.choice(_NAMES)
        make: Any = partial(RemoveAdapter, name=name)
        if random.random() < 0.7:
            folder = f"/{name}/{random.choice((1, 2, 3))}"
            make = partial(AddAdapter, name=name, folder=folder, parent="model", replace=random.random() < 0.8)
        try:
            info = await ask_library(world.system, lambda done, make=make: make(done=done))
            world.note("adapter", name, info.folder)
        except TroupeError as error:
            world.note("adapter", name, error.code)


def _digest(folder: str) -> str:
    return f"digest of {folder}"
