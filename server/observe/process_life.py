"""How a process of the server lives: its event loop, signals, log and exit code."""

import argparse
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import anyio

import troupellm
from troupellm.actors.runtime.link import Link, open_link
from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.wire.frames import ReceivedT, SentT
from troupellm.protocol.wire.lifeline import die_with
from troupellm.server.base.errors import flatten
from troupellm.server.base.exit_codes import EXIT_FAILED
from troupellm.server.observe import logs

logger = logging.getLogger("troupellm.server")

FLUSH_SECONDS = 0.3
"""Seconds that the last log lines and threads have at the end."""


class StartMessage(Protocol):
    """The first message that a child process receives."""

    @property
    def server(self) -> ServerConfig: ...


StartT = TypeVar("StartT", bound=StartMessage)


def run_loop(main: Callable[..., Awaitable[int]], *arguments: object) -> int:
    """Run `main` on uvloop where that is installed, else on asyncio's own event loop. Returns its exit code."""
    try:
        import uvloop  # noqa: F401
    except ImportError:
        has_uvloop = False
    else:
        has_uvloop = True
    return anyio.run(main, *arguments, backend_options={"use_uvloop": has_uvloop})


def run_child(
    program: str, sockets: dict[str, str], main: Callable[..., Awaitable[int]], argv: Sequence[str] | None
) -> int:
    """Run a child process of the server: it ends with its parent and ignores the signals that stop the server.

    A signal to the whole group of processes means the server: its first process decides, and ends its children.

    Args:
        program: name of the child in the help.
        sockets: the help of each option that names the descriptor of an inherited socket. `main` receives the sockets
            in this order.
        main: returns the exit code.
        argv: the command line without the program; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    for name, text in sockets.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--parent", type=int, required=True, help="process id of the server's first process")
    arguments = vars(parser.parse_args(argv))
    if not die_with(arguments["parent"]):
        return EXIT_FAILED
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return run_loop(main, *(socket.socket(fileno=arguments[name]) for name in sockets))


async def live(
    name: str,
    peer: socket.socket,
    receives: object,
    start_type: type[StartT],
    serve: Callable[[Link[SentT, ReceivedT], StartT], Awaitable[int]],
) -> int:
    """Serve the process at the other end of `peer` after its first message. Returns the exit code; an error is logged.

    Args:
        name: the process in the log.
        peer: one end of a socket pair.
        receives: union of the message types that come over it.
        start_type: type of the first message; another one ends the process.
        serve: called with the link and the first message.
    """
    link: Link[SentT, ReceivedT] = await open_link(peer, receives, troupellm.__version__)
    try:
        start = await link.receive()
        if not isinstance(start, start_type):
            return EXIT_FAILED
        logs.configure(start.server.log_format, start.server.log_level)
        return await serve(link, start)
    except Exception as error:
        logger.error("the %s has crashed", name, exc_info=flatten(error))
        return EXIT_FAILED
    finally:
        await link.aclose()
        logs.flush(FLUSH_SECONDS)
