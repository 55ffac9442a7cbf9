"""LoRA adapters of an engine: those that it serves, loading and unloading."""

from pathlib import Path

from troupellm.actors.adapters.folders import allowed_folder
from troupellm.actors.engine.adapter_sources import ask_library, plain_folder
from troupellm.actors.engine.lifecycle import EngineLife
from troupellm.protocol.messages.adapter_library import AddAdapter, FindAdapter, RemoveAdapter
from troupellm.protocol.messages.adapters import AdapterInfo


class EngineAdapters(EngineLife):
    """Part of `Engine`."""

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The LoRA adapters that requests may name, by name. Resolvers may know more."""
        sources = self._require().adapters
        return () if sources is None else sources.registry.infos

    async def list_adapters(self) -> tuple[AdapterInfo, ...]:
        """The same; awaited where the engine may live in another process."""
        return self.adapters

    async def load_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        replace: bool = False,
        base_model_name: str | None = None,
        below_lora_dir: bool = False,
    ) -> AdapterInfo:
        """Serve a LoRA adapter under a name. Returns when requests may name it.

        Args:
            path: a folder in PEFT's format.
            replace: take the place of an adapter of that name. Requests that have begun keep the old one.
            base_model_name: reported as its parent, instead of the model's name.
            below_lora_dir: refuse folders that do not lie below one of `lora_dir`; a relative path begins there.

        Raises:
            InvalidRequest: the name is taken or cannot be one, or the folder cannot be read.
            AdapterError: (an InvalidRequest) the adapter does not fit the model.
            EngineStopped: the engine was closed, or the worker took too long.
        """
        running = self._on_loop()
        folder = plain_folder(path)
        if below_lora_dir:
            links = self.config.model.allow_model_links
            folder = str(await running.machinery.pool.run(_allowed, str(path), self.config.lora.dirs, links))
        return await ask_library(
            running.system,
            lambda done: AddAdapter(
                name=name, folder=folder, parent=base_model_name or running.loaded.names[0], replace=replace, done=done
            ),
        )

    async def unload_adapter(self, name: str) -> AdapterInfo:
        """Serve a name no more. Requests that have begun go on.

        Raises:
            ModelNotFound: there is no adapter of that name.
        """
        return await ask_library(self._on_loop().system, lambda done: RemoveAdapter(name=name, done=done))

    async def find_adapter(self, name: str) -> AdapterInfo:
        """The adapter of a name; resolvers are asked for one that is not known.

        Raises:
            ModelNotFound: there is none.
        """
        running = self._on_loop()
        if running.adapters is None:
            running.system.require_adapters(name)
        elif (info := running.adapters.registry.use(name)) is not None:
            return info
        return await ask_library(running.system, lambda done: FindAdapter(name=name, done=done))


def _allowed(path: str, roots: tuple[str, ...], links: bool) -> Path:
    return allowed_folder(path, roots, links=links)
