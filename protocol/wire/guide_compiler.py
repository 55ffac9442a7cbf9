"""Messages between an engine and a process that compiles guides: one message is one frame."""

import msgspec

from troupellm import __version__
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.wire.frames import Hello

LINK_VERSION = 1
HELLO = Hello(link="guide", version=f"{__version__}/{LINK_VERSION}")
MAX_FRAME_BYTES = 16 * 2**20
"""A grammar and what it was made from, several times over."""

# To the compiler.


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the tokenizer; the first message, answered by `Prepared`."""

    tokenizer_folder: str
    follow_links: bool = False
    """Also out of the folder."""
    vocab_width: int
    memory_bytes: int
    """More than now the process may never have."""


class Compile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `Compiled` or `Refused`, or by the process's death."""

    spec: GuideSpec
    backend: str
    depth: int


class LoadBackend(msgspec.Struct, frozen=True, tag=True):
    """Get a backend ready, which may take seconds; answered by `Prepared`."""

    name: str


ToCompiler = Prepare | Compile | LoadBackend

# From the compiler.


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The grammars of this model can be compiled; or why not."""

    error: str | None = None


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    text: str
    """See `GuideProgram`."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The grammar's own fault."""

    message: str


FromCompiler = Prepared | Compiled | Refused
