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
from troupellm.server.batches import batches, files
from troupellm.server.batches.upload import MEDIA
from troupellm.server.host.server_state import ServerState


def routes(host: ServerState, prefix: str) -> list[Route]:
    def route(method: str, path: str, handler: Any, summary: str, response: Any, **more: Any) -> Route:
        problems = (404, *more.pop("problems", ()))
        return Route(
            method=method,
            path=f"{prefix}{path}",
            handler=partial(handler, host),
            summary=summary,
            response=response,
            problems=problems,
            **more,
        )

    file, batch = "/files/{file_id}", "/batches/{batch_id}"
    return [
        route(
            "POST",
            "/files",
            files.create,
            "Upload a file of requests for batches.",
            FileObject,
            media=(MEDIA,),
            form=FileForm,
        ),
        route("GET", "/files", files.listing, "Files of this key.", FileList, query=FilesQuery),
        route("GET", file, files.retrieve, "What is known of a file.", FileObject),
        route("DELETE", file, files.delete, "Delete a file.", FileDeleted, problems=(409,)),
        route("GET", f"{file}/content", files.content, "What a file holds.", None, answers="application/octet-stream"),
        route(
            "POST",
            "/batches",
            batches.create,
            "Answer a file of requests, when there is room.",
            Batch,
            body=BatchRequest,
        ),
        route("GET", "/batches", batches.listing, "Batches of this key.", BatchList, query=BatchesQuery),
        route("GET", batch, batches.retrieve, "How far a batch is.", Batch),
        route("POST", f"{batch}/cancel", batches.cancel, "Answer no more of a batch.", Batch, problems=(409,)),
    ]
