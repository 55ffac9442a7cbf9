"""Where an engine finds LoRA adapters, and how its adapter library is asked."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from troupellm.actors.adapters.actor import AdapterSources, Inspected
from troupellm.actors.adapters.registry import AdapterRegistry
from troupellm.actors.adapters.resolvers import FolderResolver, LoraResolver, installed_resolvers
from troupellm.actors.engine.system import System
from troupellm.actors.runtime.mailbox import MailboxClosed
from troupellm.actors.runtime.ports import Threads
from troupellm.actors.runtime.waiter import new_waiter
from troupellm.models.adapters.files import adapter_digest, adapter_header
from troupellm.protocol.config.lora import LoraConfig
from troupellm.protocol.errors import ConfigError, InvalidRequest, ModelLoadError, TroupeError
from troupellm.protocol.messages.adapter_library import AdapterMessage, AddAdapter
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.worker import WorkerReady

Done = Callable[[AdapterInfo | TroupeError], None]


async def ask_library(system: System, make: Callable[[Done], AdapterMessage]) -> AdapterInfo:
    """One message to the adapter library, and its answer.

    Raises:
        InvalidRequest: no adapters are served.
        EngineStopped: the engine was closed.
        TroupeError: the library's refusal.
    """
    if system.adapters is None:
        raise InvalidRequest("no adapters are served; start with enable_lora", code="not_configured")
    answers: list[AdapterInfo | TroupeError] = []
    waiter = new_waiter()

    def done(answer: AdapterInfo | TroupeError) -> None:
        answers.append(answer)
        waiter.wake()

    try:
        await system.adapters.put(make(done))
    except MailboxClosed:
        raise system.error("the engine was closed") from None
    await waiter.wait()
    answer = answers[0]
    if isinstance(answer, TroupeError):
        raise answer
    return answer


def adapter_sources(
    config: LoraConfig, ready: WorkerReady, model_names: tuple[str, ...], threads: Threads, *, links: bool
) -> AdapterSources | None:
    """Where an engine finds adapters; None where it serves none.

    Args:
        links: follow links out of `lora_dir`.

    Raises:
        ConfigError: the model or its device serves no adapters, or a plug-in cannot be loaded.
    """
    if not config.enabled:
        return None
    if not ready.max_loras:
        raise ConfigError(
            f"enable_lora: {ready.architecture} on {ready.device} serves no adapters; merge the adapter into the model",
            param="enable_lora",
        )
    folders: list[LoraResolver] = [FolderResolver(config.dirs, threads, links=links)] if config.dirs else []
    return AdapterSources(
        registry=AdapterRegistry(model_names),
        resolvers=folders + installed_resolvers(),
        inspect=_inspect,
        parent=model_names[0],
        most_searches=config.host_adapters,
    )


async def load_modules(system: System, config: LoraConfig, sources: AdapterSources) -> None:
    """Load the adapters that the settings name.

    Raises:
        ModelLoadError: one cannot be served; names it.
    """
    for module in config.modules:
        add = partial(
            AddAdapter,
            name=module.name,
            folder=plain_folder(module.path),
            parent=module.base_model_name or sources.parent,
            replace=False,
        )
        try:
            await ask_library(system, lambda done, add=add: add(done=done))  # type: ignore[misc]
        except TroupeError as error:
            raise ModelLoadError(f"lora_modules: {module.name}: {error.message}") from error


def plain_folder(path: str | Path) -> str:
    """A path as it is wherever the process works."""
    return os.path.abspath(os.path.expanduser(path))


def _inspect(folder: str) -> Inspected:
    """On a thread. The header is checked before all of the weights are read."""
    header = adapter_header(Path(folder))
    return Inspected(digest=adapter_digest(Path(folder)), rank=header.rank, num_bytes=header.num_bytes)
