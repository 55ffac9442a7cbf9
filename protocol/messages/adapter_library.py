"""Messages to the adapter library, which knows the names of adapters and has the worker read them."""

from collections.abc import Callable

import msgspec

from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.adapters import AdapterInfo
from troupellm.protocol.messages.input import PrepareRequest
from troupellm.protocol.messages.scheduler import AbortRequest


class AddAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Serve a folder under a name."""

    name: str
    folder: str
    parent: str
    """The name of the model that it belongs to."""
    replace: bool
    """The name may have an adapter; requests that have begun keep that one."""
    done: Callable[[AdapterInfo | TroupeError], None]
    """Called once."""


class RemoveAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Serve a name no more. Requests that have begun go on."""

    name: str
    done: Callable[[AdapterInfo | TroupeError], None]
    """Called once."""


class FindAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Look a name up, with the resolvers if it is not known."""

    name: str
    done: Callable[[AdapterInfo | TroupeError], None]
    """Called once."""


class ServeAdapter(msgspec.Struct, frozen=True):
    """From the scheduler: have the worker read an adapter into host memory; answered by `AdapterLoaded`."""

    digest: str
    folder: str


class DropAdapter(msgspec.Struct, frozen=True):
    """From the scheduler: no plan names this adapter, so the worker may free its host memory."""

    digest: str


AdapterAsk = ServeAdapter | DropAdapter
AdapterMessage = PrepareRequest | AddAdapter | RemoveAdapter | FindAdapter
AdapterControl = AbortRequest | AdapterAsk
