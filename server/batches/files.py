"""/v1/files."""

import anyio
import msgspec
from msgspec import UNSET

from troupellm.protocol.api.batches import FileDeleted, FileForm, FileObject, FilesQuery
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import BodyReader
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.json_body import invalid_field
from troupellm.server.base.private_files import new_name
from troupellm.server.base.upload import MEDIA, OVERHEAD_BYTES, Form, Upload
from troupellm.server.host.server_state import ServerState
from troupellm.server.storage.batches import new_file, no_such

SLOWEST_BYTES = 65_536
"""Per second: how fast an upload must be on average, beside the time that every body has."""
CHUNK_BYTES = 65_536
_LIFE = "expires_after[anchor] and expires_after[seconds]"


async def create(host: ServerState, exchange: Exchange, _: None) -> None:
    """POST /v1/files."""
    store = host.batches.store
    await store.check_room(exchange.owner)
    with host.batches.uploading(exchange.owner):
        reader = BodyReader(
            exchange,
            limit=store.config.max_file_bytes + OVERHEAD_BYTES,
            timeout=host.config.body_timeout,
            slowest=SLOWEST_BYTES,
            media=(MEDIA,),
        )
        upload = Upload(exchange.header(b"content-type") or "", store.incoming(new_name()), store.config.max_file_bytes)
        host.enter(exchange)
        with exchange.reading:
            try:
                file = _file(await upload.take(reader))
                await store.add_file(exchange.owner, file, upload.path)
            except OSError as error:
                raise store.refused(error) from error
            finally:
                upload.path.unlink(missing_ok=True)
            await exchange.respond(200, msgspec.json.encode(file))
    if exchange.reading.cancelled_caught:
        host.require()


def _file(form: Form) -> FileObject:
    """
    Raises:
        InvalidRequest: a field is wrong or missing.
    """
    if form.fields.get("purpose", "batch") != "batch":
        raise InvalidRequest("purpose must be batch", param="purpose")
    for name in form.fields.keys() - {field.encode_name for field in msgspec.structs.fields(FileForm)}:
        if name.startswith("expires_after"):  # what else a form has is ignored, but this would keep a file for ever
            raise InvalidRequest(f"{_LIFE} are what a file's life is made of", param="expires_after")
    try:
        given = msgspec.convert(form.fields, FileForm, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, FileForm, "the form") from None
    if (given.anchor is UNSET) != (given.seconds is UNSET):
        raise InvalidRequest(f"{_LIFE} come together", param="expires_after", code="missing_required_parameter")
    return new_file(form.filename, form.size, "batch", given.seconds if isinstance(given.seconds, int) else None)


async def listing(host: ServerState, exchange: Exchange, _: None) -> None:
    """GET /v1/files."""
    query: FilesQuery = exchange.query
    page = await host.batches.store.files(
        exchange.owner, after=query.after, limit=query.limit, newest=query.order == "desc", purpose=query.purpose
    )
    await exchange.respond(200, msgspec.json.encode(page))


async def retrieve(host: ServerState, exchange: Exchange, _: None) -> None:
    """GET /v1/files/{file_id}."""
    await exchange.respond(200, msgspec.json.encode(await _find(host, exchange)))


async def delete(host: ServerState, exchange: Exchange, _: None) -> None:
    """DELETE /v1/files/{file_id}."""
    file_id = exchange.path_values["file_id"]
    if not await host.batches.store.delete_file(exchange.owner, file_id):
        raise no_such("file")
    await exchange.respond(200, msgspec.json.encode(FileDeleted(id=file_id)))


async def content(host: ServerState, exchange: Exchange, _: None) -> None:
    """GET /v1/files/{file_id}/content, piece by piece."""
    file, store = await _find(host, exchange), host.batches.store
    try:
        opened = await anyio.open_file(store.content(file.id), "rb")
    except FileNotFoundError:
        raise no_such("file") from None  # deleted meanwhile
    except OSError as error:
        raise store.refused(error) from error
    async with opened:
        headers = (
            (b"content-length", str(file.bytes).encode()),
            (b"content-disposition", b"attachment"),
            (b"x-content-type-options", b"nosniff"),
        )
        await exchange.start(200, b"application/octet-stream", headers)
        left = 0 if exchange.method == "HEAD" else file.bytes
        while left > 0:
            piece = await opened.read(min(CHUNK_BYTES, left))
            if not piece:
                raise store.refused(OSError("a file is shorter than it was"))
            left -= len(piece)
            await exchange.write(piece)
        await exchange.write(b"", last=True)


async def _find(host: ServerState, exchange: Exchange) -> FileObject:
    file = await host.batches.store.file(exchange.owner, exchange.path_values["file_id"])
    if file is None:
        raise no_such("file")
    return file
