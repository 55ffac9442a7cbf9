"""A multipart body on its way to the disk: parsed piece by piece, so that memory does not grow with the file."""

from contextlib import suppress
from pathlib import Path

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import BodyReader
from troupellm.server.base.errors import too_large
from troupellm.server.base.private_files import create_private, sync
from troupellm.server.base.threads import offload

MEDIA = "multipart/form-data"
MAX_FIELDS = 16
MAX_FIELD_BYTES = 1024
MAX_BOUNDARY = 70
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096
"""Of one part: each header, with its name."""
MAX_FILENAME = 255
BUFFER_BYTES = 2**20
"""Bytes gathered before a write."""
OVERHEAD_BYTES = 65_536
"""Bytes that a body may have beside its file."""


class Form(msgspec.Struct, frozen=True):
    """A received form."""

    fields: dict[str, str]
    filename: str
    size: int
    """Bytes of the file."""


class _Part(msgspec.Struct):
    """A part that is being read."""

    header: bytes = b""
    value: bytes = b""
    headers: dict[bytes, bytes] = {}
    name: str = ""
    filename: str | None = None
    data: bytes = b""


class Upload:
    """Takes one file and some short fields. The file is written to `path`, which is there after a failure, too."""

    def __init__(self, content_type: str, path: Path, most: int) -> None:
        """
        Args:
            most: bytes that the file may have.

        Raises:
            InvalidRequest: the content type has no boundary.
        """
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY:
            raise InvalidRequest("the Content-Type needs a boundary", code="invalid_form")
        self.path = path
        self._most = most
        self._part = _Part()
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._size = 0
        self._buffer = bytearray()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    async def take(self, body: BodyReader) -> Form:
        """Read it to its end.

        Raises:
            InvalidRequest: it is no form, or has no file.
            HttpError: 413 too large, and those of the body.
            ClientGone: the client left first.
            OSError: the disk refuses.
        """
        output = await offload(create_private, self.path)
        try:
            while (piece := await body.read()) is not None:
                try:
                    self._parser.write(piece)
                except FormParserError:
                    raise _invalid("the body is no multipart form") from None
                if len(self._buffer) >= BUFFER_BYTES:
                    written, self._buffer = self._buffer, bytearray()
                    await offload(output.write, written)
            if not self._ended:
                raise _invalid("the multipart form ends too early")
            if self._filename is None:
                raise InvalidRequest("file is missing", param="file", code="missing_required_parameter")
            await offload(output.write, self._buffer)
            await offload(sync, output)
        finally:
            with suppress(OSError):  # a full disk refuses what is buffered once more
                output.close()
        return Form(self._fields, self._filename, self._size)

    def _begin_part(self) -> None:
        self._part = _Part()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]

    def _header_end(self) -> None:
        part = self._part
        part.headers[part.header.lower()] = part.value
        part.header = part.value = b""

    def _headers_finished(self) -> None:
        part = self._part
        _, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        part.name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename")
        if filename is None:
            if part.name in self._fields or len(self._fields) >= MAX_FIELDS:
                raise _invalid("the form has a field twice, or too many fields")
            return
        if part.name != "file" or self._filename is not None:
            raise InvalidRequest("the form must have one file, called file", param="file", code="invalid_form")
        self._filename = part.filename = plain_name(filename.decode("utf-8", "replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.filename is not None:
            self._size += end - start
            if self._size > self._most:
                raise too_large(self._most)
            self._buffer += data[start:end]
            return
        part.data += data[start:end]
        if len(part.data) > MAX_FIELD_BYTES:
            raise InvalidRequest("a field of the form is too long", param=part.name[:64], code="invalid_form")

    def _end_part(self) -> None:
        part = self._part
        if part.filename is None:
            self._fields[part.name] = part.data.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


def plain_name(given: str) -> str:
    """A file's name as it is told of later; it is never a path."""
    last = given.replace("\\", "/").rpartition("/")[2]
    plain = "".join(letter if letter.isprintable() else "?" for letter in last)[:MAX_FILENAME]
    return plain or "file"


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_form")
