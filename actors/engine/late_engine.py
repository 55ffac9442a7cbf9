"""`troupellm.Engine` for a program that first names it inside its running event loop.

Importing the engine takes a third of a second, and the loop would stand still meanwhile. `LateEngine` takes the same
arguments, imports the engine on a thread when it is entered, and becomes an `Engine` then. Outside a running loop, or
once the engine is imported, `troupellm.Engine` is the class itself.
"""

import asyncio  # noqa: TID251 - this is imported before the ports, which take their time themselves
import sys
import threading  # noqa: TID251
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any

_HOME = "troupellm.actors.engine.engine"


def engine_class() -> Any:
    """The class `Engine`, or its stand-in where importing it now would hold up an event loop."""
    if not _is_imported():
        with suppress(RuntimeError):
            asyncio.get_running_loop()
            return LateEngine
    return import_module(_HOME).Engine


class _Late(type):
    """Attributes of the class come from `Engine`, which the look-up imports at once."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, body)
        engine = import_module(_HOME).Engine  # a subclass is one of Engine
        return type(engine)(name, tuple(engine if isinstance(base, _Late) else base for base in bases), body)

    def __getattr__(cls, name: str) -> Any:
        return getattr(import_module(_HOME).Engine, name)

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is cls or (_is_imported() and isinstance(instance, import_module(_HOME).Engine))


class LateEngine(metaclass=_Late):
    """See the module. Settings are checked on entering."""

    def __init__(self, model: Any = None, **settings: Any) -> None:
        self._arguments: tuple[Any, dict[str, Any]] = (model, settings)

    async def __aenter__(self) -> Any:
        await _import_beside()
        self._become()
        return await type(self).__aenter__(self)  # by now that of Engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await type(self).__aexit__(self, kind, error, traceback)  # as above

    @classmethod
    async def open(cls, model: Any = None, **settings: Any) -> Any:
        """As that of Engine."""
        await _import_beside()
        return await import_module(_HOME).Engine.open(model, **settings)

    def __getattr__(self, name: str) -> Any:
        """Anything else needs the engine now, and its import at once."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._become()
        return getattr(self, name)

    def _become(self) -> None:
        if type(self) is LateEngine:
            model, settings = self._arguments
            engine = import_module(_HOME).Engine(model, **settings)  # a wrong setting leaves this as it is
            vars(self).clear()
            vars(self).update(vars(engine))
            self.__class__ = type(engine)


def _is_imported() -> bool:
    """Not while another thread is importing it, whose end would be waited for."""
    return hasattr(sys.modules.get(_HOME), "Engine")


async def _import_beside() -> None:
    """Import the engine on a thread of its own. Being cancelled leaves that thread at work; it ends by itself.

    Raises:
        Exception: what the import raised.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.done():
            done.set_result(None) if error is None else done.set_exception(error)

    def work() -> None:
        failure: BaseException | None = None
        try:
            import_module(_HOME)
        except BaseException as error:  # it belongs to the task that waits
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, failure)

    threading.Thread(target=work, name="troupellm-import", daemon=True).start()
    await done
