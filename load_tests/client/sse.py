"""Server-sent events from bytes. Sans I/O: fed with what a socket gave, it returns the events that became complete."""


class SseReader:
    """Collects `data:` lines into events; comments and other fields are skipped, as clients of this API do."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes; give the payload of every event that is complete now."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
