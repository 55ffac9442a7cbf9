"""The routes of files and batches."""

from functools import partial
from typing import Any

from troupellm.protocol.api.batches import (
    Batch,
    BatchesQuery,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileForm,
    FileList,
    FileObject,
    FilesQuery,
)
from troupellm.server.base.router import Route
from troupellm.server.base.upload import MEDIA
from troupellm.server.batches import batches, files
from troupellm.server.host.server_state import ServerState


def routes(host: ServerState, prefix: str) -> list[Route]:
    def route(method: str, path: str, handler: Any, response: Any, summary: str, **more: Any) -> Route:
        given = {"response": response, "summary": summary, "problems": (404,), **more}
        return Route(method=method, path=prefix + path, handler=partial(handler, host), **given)

    form = {"media": (MEDIA,), "form": FileForm}
    over, answer = {"problems": (404, 409)}, "Answer a file of requests, when there is room."
    file, batch, data = "/files/{file_id}", "/batches/{batch_id}", "application/octet-stream"
    return [
        route("POST", "/files", files.create, FileObject, "Upload a file of requests for batches.", **form),
        route("GET", "/files", files.listing, FileList, "Files of this key.", query=FilesQuery),
        route("GET", file, files.retrieve, FileObject, "What is known of a file."),
        route("DELETE", file, files.delete, FileDeleted, "Delete a file.", **over),
        route("GET", f"{file}/content", files.content, None, "What a file holds.", answers=data),
        route("POST", "/batches", batches.create, Batch, answer, body=BatchRequest),
        route("GET", "/batches", batches.listing, BatchList, "Batches of this key.", query=BatchesQuery),
        route("GET", batch, batches.retrieve, Batch, "How far a batch is."),
        route("POST", f"{batch}/cancel", batches.cancel, Batch, "Answer no more of a batch.", **over),
    ]
