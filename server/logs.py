"""Log lines of the server. As a library nothing is configured; `serve` owns its process and calls `configure`."""

import logging
import sys
import time

import msgspec

from troupellm.server.exchange import Exchange

access = logging.getLogger("troupellm.access")

CLIENT_CLOSED = 499
"""Only ever logged: the client left before the answer was complete."""


def log_access(exchange: Exchange, seconds: float) -> None:
    """One line per request. The path is percent-encoded by its sender, so a line cannot be forged."""
    if not access.isEnabledFor(logging.INFO):
        return
    status = CLIENT_CLOSED if exchange.gone else exchange.status
    path = exchange.raw_path[:256].decode("ascii", "replace")
    fields = {
        "client": exchange.client,
        "method": exchange.method,
        "path": path,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "request_id": exchange.request_id,
    }
    line = f'{exchange.client} "{exchange.method} {path}" {status} {seconds * 1000:.1f}ms {exchange.request_id}'
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


def configure(form: str) -> None:
    """Send this package's records to standard error, unless the process has set up logging already."""
    root = logging.getLogger("troupellm")
    if root.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
