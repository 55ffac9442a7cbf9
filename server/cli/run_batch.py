"""`troupellm run-batch -i requests.jsonl -o results.jsonl`: OpenAI's batch files without a server."""

import argparse
import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from troupellm.protocol.config.sizes import human_int
from troupellm.protocol.errors import ConfigError, ModelLoadError, TroupeError
from troupellm.server.base.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_MODEL, EXIT_OK
from troupellm.server.cli.flags import add_config_flags, load_configs

if TYPE_CHECKING:
    from troupellm.protocol.config.engine import EngineConfig, ServerConfig
    from troupellm.server.cli.batch_results import Tally

STANDARD = "-"
_EPILOG = (
    "Results stand in the order of the requests, also of those that were refused. An output file that holds the first "
    "results already is gone on with. Exit codes: 0 every request has its result; 1 failed; 2 wrong flag or setting; "
    "3 model not loadable; 130 interrupted"
)


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    usage = "troupellm run-batch -i FILE -o FILE [options]"
    parser = subparsers.add_parser(
        "run-batch", help="answer a file of requests", usage=usage, epilog=_EPILOG, allow_abbrev=False
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one per line; - is stdin")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="their results; - is stdout")
    parser.add_argument("--max-inflight", metavar="N", help="requests at once (default: twice max_num_seqs)")
    parser.add_argument("--overwrite", action="store_true", help="begin anew instead of going on with an output file")
    parser.add_argument(
        "--disable-progress", action="store_true", help="no progress bar (there is none without a terminal)"
    )
    add_config_flags(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    import anyio

    from troupellm.server.cli.batch_results import Tally

    engine_config, server_config = load_configs(arguments)
    most = _most(arguments, engine_config)
    tally = Tally()
    try:
        with ExitStack() as stack:
            files = _open(arguments, stack, tally)
            work = partial(_run, files, engine_config, server_config, most, tally, hidden=arguments.disable_progress)
            anyio.run(work)
    except ConfigError:
        raise
    except ModelLoadError as error:
        print(f"troupellm: {error.message}", file=sys.stderr)
        return EXIT_MODEL
    except (TroupeError, OSError) as error:
        print(f"troupellm: {_text(error)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        _print(tally, "interrupted; the same command goes on from here")
        return EXIT_INTERRUPTED
    _print(tally, "done")
    return EXIT_OK


class _Files(NamedTuple):
    source: BinaryIO
    total: int | None
    """Requests in it, where that can be known before."""
    output: BinaryIO
    known: list[str | None]
    """Names of the results that the output has already."""


def _open(arguments: argparse.Namespace, stack: ExitStack, tally: "Tally") -> _Files:
    """
    Raises:
        OSError: a file cannot be read or written.
        ConfigError: both are the same file.
        ResumeError: the output file holds something else.
    """
    from troupellm.server.batches.lines import count_lines
    from troupellm.server.cli.batch_results import resume

    known: list[str | None] = []
    if arguments.input_file == STANDARD:
        source: BinaryIO = sys.stdin.buffer
        total = None
    else:
        source = stack.enter_context(open(arguments.input_file, "rb"))  # noqa: SIM115 - the stack closes it
        total = count_lines(source, sys.maxsize) if source.seekable() else None
        if total is not None:
            source.seek(0)
    if arguments.output_file == STANDARD:
        return _Files(source, total, sys.stdout.buffer, known)
    target = Path(arguments.output_file)
    if target.is_file() and os.path.samestat(os.fstat(source.fileno()), target.stat()):
        raise ConfigError("-o must not be the input file, which it would overwrite", param="output_file")
    if target.is_file() and not arguments.overwrite:
        known = resume(target, tally)
    mode = "wb" if arguments.overwrite else "ab"
    output: BinaryIO = stack.enter_context(open(target, mode))  # type: ignore[assignment]  # noqa: SIM115
    if target.is_file():
        stack.callback(lambda: os.fsync(output.fileno()))
    return _Files(source, total, output, known)


async def _run(
    files: _Files,
    engine_config: "EngineConfig",
    config: "ServerConfig",
    most: int,
    tally: "Tally",
    *,
    hidden: bool,
) -> None:
    import msgspec
    from tqdm import tqdm

    from troupellm.actors.engine.engine import Engine
    from troupellm.protocol.api.batches import BatchResult
    from troupellm.server.app.routes import routes
    from troupellm.server.base.errors import flatten
    from troupellm.server.cli.batch_results import answer_all, count
    from troupellm.server.host.internal_requests import Inside
    from troupellm.server.host.server_state import ServerState
    from troupellm.server.observe.load_log import LoadLog, terminal

    worker = engine_config.worker
    if worker.worker_process is None:
        worker = msgspec.structs.replace(worker, worker_process=True, spare_worker=False)
    progress = None if hidden else LoadLog(terminal()).report
    async with Engine(config=msgspec.structs.replace(engine_config, worker=worker), progress=progress) as engine:
        host = ServerState(config, engine)
        begun = len(files.known)
        # Without a terminal there is none.
        with tqdm(total=files.total, initial=begun, unit="req", disable=hidden or None, file=sys.stderr) as bar:

            def on_result(result: BatchResult) -> None:
                count(tally, result)
                bar.update()
                bar.set_postfix(failed=tally.failed, refresh=False)

            try:
                await answer_all(
                    Inside(host, routes(host, "/v1")),
                    files.source,
                    files.output,
                    most=most,
                    longest=config.max_body_bytes,
                    known=files.known,
                    on_result=on_result,
                )
            except ExceptionGroup as error:
                raise flatten(error) from None
            finally:
                await host.responses.close()


def _most(arguments: argparse.Namespace, engine_config: "EngineConfig") -> int:
    """Requests at once."""
    scheduler = engine_config.scheduler
    if arguments.max_inflight is None:
        return min(2 * scheduler.max_num_seqs, scheduler.max_num_seqs + scheduler.max_num_queued_reqs)
    try:
        most = human_int(arguments.max_inflight)
    except ValueError:
        most = 0
    if most < 1:
        raise ConfigError("--max-inflight must be a whole number of at least 1", param="max_inflight")
    return most


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return error.message if isinstance(error, TroupeError) else str(error)


def _print(tally: "Tally", how: str) -> None:
    found = f", {tally.resumed} of them before" if tally.resumed else ""
    print(f"{how}: {tally.completed} answered, {tally.failed} failed{found}", file=sys.stderr)
