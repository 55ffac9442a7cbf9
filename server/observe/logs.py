"""Log lines of the server. As a library nothing is configured; `serve` owns its process and calls `configure`."""

import logging
import re
import sys
import time

import msgspec

from troupellm.server.base.exchange import Exchange
from troupellm.server.observe.log_writer import LogWriter, QueuedHandler

access = logging.getLogger("troupellm.access")
stats = logging.getLogger("troupellm.stats")

MAX_PARAM = 128
_PACKAGE = "troupellm"
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
"""A line of the log cannot be forged with the rest."""
LONGEST_BRIEF = 500
"""Characters of a record of another package."""


def log_access(exchange: Exchange) -> None:
    """One line per request. The path is percent-encoded by its sender, so a line cannot be forged."""
    if not access.isEnabledFor(logging.INFO):
        return
    seconds = time.monotonic() - exchange.began
    status = exchange.final_status
    path = exchange.raw_path[:256].decode("ascii", "replace")
    fields: dict[str, object] = {
        "client": exchange.client,
        "method": exchange.method,
        "path": path,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "request_id": exchange.request_id,
    }
    line = f'{exchange.client} "{exchange.method} {path}" {status} {seconds * 1000:.1f}ms {exchange.request_id}'
    if exchange.key:
        fields["key"] = exchange.key
        line += f" key={exchange.key}"
    if exchange.failure is not None:
        cause, param = exchange.failure
        fields["cause"] = cause
        line += f" cause={cause}"
        if param is not None:  # it may hold names that the client made up
            fields["param"] = param[:MAX_PARAM]
            line += f" param={_ODD.sub('?', param[:MAX_PARAM])}"
    if exchange.prompt_tokens is not None:
        fields["prompt_tokens"] = exchange.prompt_tokens
        fields["completion_tokens"] = exchange.completion_tokens or 0
        line += f" prompt={exchange.prompt_tokens} completion={exchange.completion_tokens or 0}"
    if exchange.first_token_seconds is not None:
        fields["ttft_ms"] = round(exchange.first_token_seconds * 1000, 1)
        line += f" ttft={exchange.first_token_seconds * 1000:.1f}ms"
    access.info(line, extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class BriefFormatter(logging.Formatter):
    """One short line per record, for what other packages say: clients make them say it as often as they like."""

    def __init__(self, formatter: logging.Formatter) -> None:
        """formatter: makes the line."""
        super().__init__()
        self._formatter = formatter

    def format(self, record: logging.LogRecord) -> str:
        try:
            text = record.getMessage()
        except Exception as error:  # their arguments need not fit their text
            text = f"{record.msg} ({type(error).__name__})"
        raised = None if not record.exc_info else record.exc_info[1]
        while isinstance(raised, BaseExceptionGroup):
            raised = raised.exceptions[0]
        if raised is not None:
            text += f": {type(raised).__name__}: {raised}"
        brief = " ".join(text[:LONGEST_BRIEF].split())
        return self._formatter.format(
            logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, brief, (), None)
        )


def configure(form: str, level: str = "info") -> None:
    """Send all records to standard error by one bounded queue, unless the process has set up logging already.

    Other packages' records are those from warnings on, and warnings of Python, a line each.
    """
    root = logging.getLogger(_PACKAGE)
    if root.handlers or logging.getLogger().handlers:
        return
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    formatter = JsonFormatter() if form == "json" else text

    def notice(lines: int) -> str:
        message = f"{lines} log lines were dropped: they were not taken in time"
        return formatter.format(logging.LogRecord(_PACKAGE, logging.WARNING, "", 0, message, (), None))

    writer = LogWriter(sys.stderr.fileno(), notice)
    others = QueuedHandler(writer)
    others.setFormatter(BriefFormatter(formatter))
    logging.getLogger().addHandler(others)  # without it each would be written at once, on the event loop
    logging.captureWarnings(True)
    handler = QueuedHandler(writer)
    handler.setFormatter(formatter)
    root.addHandler(handler)
    root.setLevel(level.upper())
    root.propagate = False


def dropped() -> int | None:
    """Lines that were never written; None where the process has logging of its own."""
    writers = _writers()
    return sum(writer.dropped for writer in writers) if writers else None


def flush(seconds: float) -> None:
    """Give waiting lines up to `seconds` to be written."""
    for writer in _writers():
        writer.flush(seconds)


def _writers() -> list[LogWriter]:
    handlers = logging.getLogger(_PACKAGE).handlers
    return [handler.writer for handler in handlers if isinstance(handler, QueuedHandler)]
