"""The names of adapters: those that are served, and those that were looked for in vain. Both are bounded."""

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from troupellm.protocol.config.lora import MOST_ADAPTERS, is_adapter_name
from troupellm.protocol.errors import InvalidRequest, ModelNotFound
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.params.checks import printable

MISSING_SECONDS: Final = 30.0
"""How long a name that no resolver knows is not looked for again."""
_MOST_MISSING: Final = 4096
_MOST_LISTED: Final = 32
"""Names in an error."""


class AdapterRegistry:
    """Outlives restarts of the library actor. Names that a resolver has found give way to others when it is full."""

    def __init__(self, model_names: Collection[str]) -> None:
        """model_names: of the model itself, which no adapter may have."""
        self._model_names = tuple(model_names)
        self._served: OrderedDict[str, AdapterInfo] = OrderedDict()
        """The least recently used first."""
        self._resolved: OrderedDict[str, None] = OrderedDict()
        """Names that a resolver has found, in the same order."""
        self._missing: OrderedDict[str, float] = OrderedDict()
        """Until when, in seconds."""

    def __len__(self) -> int:
        return len(self._served)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """By name."""
        return tuple(sorted(self._served.values(), key=lambda info: info.name))

    def get(self, name: str) -> AdapterInfo | None:
        return self._served.get(name)

    def use(self, name: str) -> AdapterInfo | None:
        """The adapter of a name that a request asks for."""
        info = self._served.get(name)
        if info is not None and name in self._resolved:
            self._resolved.move_to_end(name)
        return info

    def check(self, name: str, *, replace: bool = True, param: str = "lora_name") -> None:
        """A load call may take the name of an adapter that a resolver has found.

        Raises:
            InvalidRequest: no adapter can be served under that name now.
        """
        if not is_adapter_name(name):
            text = f"{param}: {printable(name)} is no name of an adapter; use 1 to 128 letters, digits, '.', '_', '-'"
            raise InvalidRequest(f"{text} and '/'", param=param)
        if name in self._model_names:
            raise InvalidRequest(f"{param}: {name} is the name of the model itself; take another one", param=param)
        if name in self._served:
            if not replace and name not in self._resolved:
                raise InvalidRequest(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                    " 'load_inplace' to True.",
                    param=param,
                )
        elif len(self._served) >= MOST_ADAPTERS and not self._resolved:
            raise InvalidRequest(
                f"{param}: {MOST_ADAPTERS} adapters are served, which is the most; unload one first", param=param
            )

    def add(self, info: AdapterInfo, *, resolved: bool = False) -> None:
        """Serve an adapter under a name that was checked.

        Args:
            resolved: a resolver has found it, and would find it again.
        """
        self._missing.pop(info.name, None)
        self._resolved.pop(info.name, None)
        self._served[info.name] = info
        if resolved:
            self._resolved[info.name] = None
        if len(self._served) > MOST_ADAPTERS and self._resolved:
            name, _ = self._resolved.popitem(last=False)
            del self._served[name]

    def remove(self, name: str) -> AdapterInfo:
        """
        Raises:
            ModelNotFound: there is no such adapter.
        """
        info = self._served.pop(name, None)
        self._resolved.pop(name, None)
        if info is None:
            raise ModelNotFound(f"The lora adapter {printable(name)} cannot be found.", param="lora_name")
        return info

    def note_missing(self, name: str, now: float) -> None:
        """No resolver knows a name."""
        self._missing[name] = now + MISSING_SECONDS
        self._missing.move_to_end(name)
        if len(self._missing) > _MOST_MISSING:
            self._missing.popitem(last=False)

    def is_missing(self, name: str, now: float) -> bool:
        """Whether a name was looked for in vain a short while ago."""
        until = self._missing.get(name)
        if until is None:
            return False
        if now < until:
            return True
        del self._missing[name]
        return False

    def not_found(self, name: str) -> ModelNotFound:
        """The error for a name that is not served."""
        return not_served(name, [*self._model_names, *sorted(self._served)])


def not_served(name: str, names: list[str]) -> ModelNotFound:
    """The error for a model's name that is not served.

    Args:
        names: those that are.
    """
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    listed = ", ".join(names[:_MOST_LISTED])
    return ModelNotFound(f"no model named {printable(name)}; served here: {listed}{more}", param="model")
