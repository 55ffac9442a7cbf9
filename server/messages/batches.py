"""/v1/messages/batches: batches of the files' API whose lines all ask for a message.

The requests of one become an input file of its key, and its results come from the batch's output files. All of them
count as the key's files, and go with the batch.
"""

import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Final

import anyio
import msgspec

from troupellm.protocol.api.batches import OVER, Batch
from troupellm.protocol.api.message_batches import (
    BatchedMessage,
    MessageBatch,
    MessageBatchDeleted,
    MessageBatchesQuery,
    MessageBatchList,
    MessageBatchRequest,
)
from troupellm.protocol.errors import Conflict, InvalidRequest
from troupellm.server.base.errors import HttpError
from troupellm.server.base.exchange import Exchange
from troupellm.server.base.private_files import create_private, new_name, sync
from troupellm.server.base.threads import offload
from troupellm.server.host.server_state import ServerState
from troupellm.server.messages.batch_shapes import EXPIRED, canceled, name_of, result_of, shown
from troupellm.server.storage.batches import Store, new_batch, new_file, no_such

PREFIX: Final = "msgbatch_"
WINDOW: Final = 24 * 3600
LIFE: Final = 29 * 24 * 3600
"""Seconds after which the results of a batch are gone."""
_REQUESTS: Final = "requests"
_GROUP_LINES, _GROUP_BYTES = 256, 2**20
_MARK: Final = f'"code":"{EXPIRED}"'.encode()


async def create(host: ServerState, prefix: str, exchange: Exchange, request: MessageBatchRequest) -> None:
    """POST /v1/messages/batches."""
    batches, store = host.batches, host.batches.store
    batches.require_runner()
    _check(request.requests, store.config.max_batch_lines)
    await store.check_room(exchange.owner)
    name = f"{PREFIX}{secrets.token_hex(12)}"
    path = store.incoming(new_name())
    try:
        size = await offload(_write, path, request.requests, f"{prefix}/messages")
        file = new_file(f"{name}_input.jsonl", size, "batch", LIFE)
        await store.add_file(exchange.owner, file, path)
    except OSError as error:
        raise store.refused(error) from error
    finally:
        path.unlink(missing_ok=True)
    batch = new_batch(name, f"{prefix}/messages", file.id, ("24h", WINDOW), {_REQUESTS: str(len(request.requests))})
    try:
        await store.add_batch(exchange.owner, batch, LIFE)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await store.delete_file(exchange.owner, file.id)
        raise
    await _answer(host, prefix, exchange, batch)


async def listing(host: ServerState, prefix: str, exchange: Exchange, _: None) -> None:
    """GET /v1/messages/batches."""
    query: MessageBatchesQuery = exchange.query
    if query.after_id is not None and query.before_id is not None:
        raise InvalidRequest("after_id and before_id exclude each other", param="before_id")
    after, before = query.after_id, query.before_id
    page = await host.batches.store.batches(
        exchange.owner, after=after, before=before, limit=query.limit, prefix=PREFIX
    )
    data = [await _shown(host, prefix, batch) for batch in page.data]
    body = MessageBatchList(data=data, has_more=page.has_more, first_id=page.first_id, last_id=page.last_id)
    await exchange.respond(200, msgspec.json.encode(body))


async def retrieve(host: ServerState, prefix: str, exchange: Exchange, _: None) -> None:
    """GET /v1/messages/batches/{batch_id}."""
    await _answer(host, prefix, exchange, await _find(host, exchange))


async def cancel(host: ServerState, prefix: str, exchange: Exchange, _: None) -> None:
    """POST /v1/messages/batches/{batch_id}/cancel."""
    batch = await _find(host, exchange)
    await _answer(host, prefix, exchange, await host.batches.store.cancel_batch(exchange.owner, batch.id) or batch)


async def delete(host: ServerState, prefix: str, exchange: Exchange, _: None) -> None:
    """DELETE /v1/messages/batches/{batch_id}, with its files."""
    batch, store = await _find(host, exchange), host.batches.store
    if batch.status not in OVER:
        raise Conflict("the batch has not ended yet: cancel it first", code="batch_not_over")
    await store.delete_batch(exchange.owner, batch.id)
    for file in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        if file is not None:
            await store.delete_file(exchange.owner, file)
    await exchange.respond(200, msgspec.json.encode(MessageBatchDeleted(id=batch.id)))


async def results(host: ServerState, prefix: str, exchange: Exchange, _: None) -> None:
    """GET /v1/messages/batches/{batch_id}/results, piece by piece."""
    batch, store = await _find(host, exchange), host.batches.store
    if batch.status not in OVER:
        raise HttpError(404, "the batch has not ended yet, so it has no results", code="batch_not_over")
    with closing(_pieces(store, batch)) as pieces:
        piece = await offload(next, pieces, b"")  # an error of the disk is still an answer
        await exchange.start(200, b"application/x-jsonl", ((b"x-content-type-options", b"nosniff"),))
        while piece and exchange.method != "HEAD":
            await exchange.write(piece)
            piece = await offload(next, pieces, b"")
        await exchange.write(b"", last=True)


def _check(requests: list[BatchedMessage], most: int) -> None:
    """
    Raises:
        InvalidRequest: too many, or two of one name.
    """
    if len(requests) > most:
        raise InvalidRequest(f"requests must have at most {most} entries, got {len(requests)}", param=_REQUESTS)
    seen: set[str] = set()
    for place, request in enumerate(requests):
        here = f"{_REQUESTS}[{place}]"
        if request.custom_id in seen:
            raise InvalidRequest(f"{here}.custom_id: another request has it already", param=f"{here}.custom_id")
        seen.add(request.custom_id)


def _write(path: Path, requests: Iterable[BatchedMessage], url: str) -> int:
    """The input file; how many bytes it has."""
    with create_private(path) as output:
        size = 0
        for request in requests:
            line = {"custom_id": request.custom_id, "method": "POST", "url": url, "body": request.params}
            size += output.write(msgspec.json.encode(line) + b"\n")
        sync(output)
        return size


async def _find(host: ServerState, exchange: Exchange) -> Batch:
    """
    Raises:
        HttpError: 404, it is not there, or another key's.
    """
    name = exchange.path_values["batch_id"]
    batch = await host.batches.store.batch(exchange.owner, name) if name.startswith(PREFIX) else None
    if batch is None:
        raise no_such("batch")
    return batch


async def _answer(host: ServerState, prefix: str, exchange: Exchange, batch: Batch) -> None:
    await exchange.respond(200, msgspec.json.encode(await _shown(host, prefix, batch)))


async def _shown(host: ServerState, prefix: str, batch: Batch) -> MessageBatch:
    store, expired = host.batches.store, 0
    if batch.status == "expired" and batch.error_file_id is not None:
        expired = await offload(_count_expired, store.content(batch.error_file_id))
    number = int((batch.metadata or {}).get(_REQUESTS, "0"))
    return shown(batch, number, expired, f"{prefix}/messages/batches/{batch.id}/results")


def _count_expired(path: Path) -> int:
    try:
        with path.open("rb") as source:
            return sum(_MARK in line for line in source)
    except OSError:  # its life is over
        return 0


def _pieces(store: Store, batch: Batch) -> Generator[bytes, None, None]:
    """The results of a batch that has ended, several at once. Blocks."""
    answered: set[str] = set()
    for name in (batch.output_file_id, batch.error_file_id):
        if name is None:
            continue
        with _opened(store, name) as source:
            for group in _groups(source):
                results = [result_of(line) for line in group]
                answered.update(custom_id for custom_id, _ in results)
                yield b"".join([result for _, result in results])
    if batch.status != "cancelled":
        return
    with _opened(store, batch.input_file_id) as source:
        for group in _groups(source):
            names = [name for name in map(name_of, group) if name not in answered]
            if names:
                yield b"".join(map(canceled, names))


def _opened(store: Store, name: str) -> BinaryIO:
    try:
        return store.content(name).open("rb")
    except FileNotFoundError:
        raise HttpError(404, "the results of this batch are not kept any more", code="results_gone") from None
    except OSError as error:
        raise store.refused(error) from error


def _groups(source: BinaryIO) -> Iterator[list[bytes]]:
    group, size = list[bytes](), 0
    for line in source:
        group.append(line)
        size += len(line)
        if len(group) >= _GROUP_LINES or size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
