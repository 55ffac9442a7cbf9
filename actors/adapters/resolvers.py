"""Where adapters come from that no call has loaded: folders below `lora_dir`, the hub, then plug-ins."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final, Protocol

from troupellm.actors.adapters.folders import find_below
from troupellm.actors.runtime.ports import Threads
from troupellm.protocol.errors import ConfigError

GROUP: Final = "troupellm.lora_resolvers"
"""Entry points of plug-ins: a name, and a class without arguments or an object that is a `LoraResolver`."""


class LoraResolver(Protocol):
    """Finds the folders of adapters."""

    async def resolve(self, name: str) -> Path | None:
        """The folder of an adapter, in PEFT's format; None where this resolver has none of that name.

        Called on the event loop, once for a name at a time. A name has letters, digits, '.', '_', '-' and '/'.
        """


class FolderResolver:
    """Adapters by the names of their folders."""

    def __init__(self, roots: Sequence[str], threads: Threads, *, links: bool) -> None:
        """links: follow links out of the roots."""
        self._roots, self._links = tuple(roots), links
        self._threads = threads

    async def resolve(self, name: str) -> Path | None:
        return await self._threads.run(partial(find_below, self._roots, name, links=self._links))


class HubResolver:
    """Adapters of the hub by the names of their repositories, as far as the settings allow them."""

    def __init__(self, patterns: Sequence[str], fetch: Callable[[str], Path | None], threads: Threads) -> None:
        """
        Args:
            patterns: owner/name, with `*` for any characters.
            fetch: downloads the adapter of a repository, on a thread; None: there is none.
        """
        self._patterns, self._fetch, self._threads = tuple(patterns), fetch, threads

    async def resolve(self, name: str) -> Path | None:
        if name.count("/") != 1 or not any(fnmatchcase(name, pattern) for pattern in self._patterns):
            return None
        return await self._threads.run(self._fetch, name)


def installed_resolvers() -> list[LoraResolver]:
    """Those of plug-ins, by their names.

    Raises:
        ConfigError: one cannot be loaded; names it.
    """
    found: list[LoraResolver] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            loaded = point.load()
            found.append(loaded() if isinstance(loaded, type) else loaded)
        except Exception as error:  # a plug-in may raise anything
            raise ConfigError(f"the LoRA resolver {point.name} cannot be loaded: {error}", param="lora_dir") from error
    return found
