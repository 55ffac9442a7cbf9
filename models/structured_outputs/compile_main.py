"""A process that compiles guides: `python -m troupellm.models.structured_outputs.compile_main FD PARENT_PID`.

Untrusted guides are first read and compiled here, in a process with a memory limit that may be killed at any moment:
the caller waits one second for it. A guide that passes is compiled again in the worker, and is known to be cheap.
"""

import os
import resource
import signal
import socket
import sys
from pathlib import Path

from troupellm.models.hub.model_folder import Followed
from troupellm.models.processes.process_limits import lift, limit
from troupellm.models.structured_outputs.backend import Backend, GuideError
from troupellm.models.structured_outputs.backends import check_start, make_backend, mask_words, program_text
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.wire.frame_socket import FrameSocket
from troupellm.protocol.wire.frames import FrameError
from troupellm.protocol.wire.guide_compiler import (
    HELLO,
    MAX_FRAME_BYTES,
    Compile,
    Compiled,
    FromCompiler,
    LoadBackend,
    Prepare,
    Prepared,
    Refused,
    ToCompiler,
)
from troupellm.protocol.wire.lifeline import die_with

NICE = 5
"""Steps of the model have three times the share of a busy processor."""
EXIT_GONE = 0
EXIT_BAD_FRAME = 3

Link = FrameSocket[FromCompiler, ToCompiler]


def main() -> int:
    """Serve the parent until it closes the socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    if not die_with(parent):
        return EXIT_GONE
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    link: Link = FrameSocket(socket.socket(fileno=descriptor), ToCompiler, HELLO, limit=MAX_FRAME_BYTES)
    try:
        link.greet()
        return _Server(link).run()
    except FrameError:
        return EXIT_GONE


class _Server:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._tokenizer: Tokenizer | None = None
        self._vocab_width = self._words = self._memory_bytes = 0
        self._backends: dict[str, Backend] = {}

    def run(self) -> int:
        while True:
            match self._link.receive():
                case Prepare() as message:
                    self._link.send(Prepared(self._prepare(message)))
                case LoadBackend(name=name):
                    self._link.send(Prepared(self._load(name)))
                case Compile() as message:
                    self._link.send(self._compile(message))

    def _prepare(self, message: Prepare) -> str | None:
        self._vocab_width = message.vocab_width
        try:
            home = Path(message.tokenizer_folder)
            self._tokenizer = Tokenizer.load(Followed(home) if message.follow_links else home)
            self._words = mask_words(self._tokenizer, self._vocab_width)
            self._backend("llguidance")
        except Exception as error:  # a tokenizer's files may hold anything
            return f"{type(error).__name__}: {error}"[:500]
        self._memory_bytes = message.memory_bytes
        limit_memory(message.memory_bytes)
        return None

    def _load(self, name: str) -> str | None:
        lift(resource.RLIMIT_AS)  # for its libraries
        try:
            self._backend(name)
        except GuideError as error:
            return str(error)
        finally:
            limit_memory(self._memory_bytes)
        return None

    def _compile(self, message: Compile) -> Compiled | Refused:
        """Compile, and look at the first token: a grammar that cannot even begin is refused here."""
        try:
            backend = self._backend(message.backend)
            text = program_text(message.spec, message.backend, message.depth, backend.special_tokens)
            check_start(backend, backend.compile(text), self._words)
        except GuideError as error:
            return Refused(str(error))
        except RecursionError:
            return Refused("it is nested too deeply")
        except MemoryError:
            return Refused("it takes too much memory to compile")
        except Exception:  # libraries may raise anything for untrusted text
            return Refused("it cannot be compiled")
        return Compiled(text=text)

    def _backend(self, name: str) -> Backend:
        if name not in self._backends:
            assert self._tokenizer is not None
            self._backends[name] = make_backend(name, self._tokenizer, self._vocab_width)
        return self._backends[name]


def limit_memory(more: int) -> None:
    """Never have more than now and `more` bytes on top."""
    status = Path("/proc/self/statm")
    if status.is_file():  # Linux
        pages = int(status.read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + more
        limit(resource.RLIMIT_AS, most)


if __name__ == "__main__":
    sys.exit(main())
