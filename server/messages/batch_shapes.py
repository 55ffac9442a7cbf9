"""A batch of the files' API as a batch of messages, and the lines of its files as results."""

import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from troupellm.protocol.api.batches import OVER, Batch, BatchLine, BatchResult
from troupellm.protocol.api.message_batches import MessageBatch, MessageBatchCounts

EXPIRED: Final = "batch_expired"
"""The code of a line that was not answered in time."""


def shown(batch: Batch, num_requests: int, num_expired: int, results_url: str) -> MessageBatch:
    """
    Args:
        num_requests: as it was created with; the batch counts them a moment later.
        num_expired: of the failed lines, those that were not answered in time.
    """
    ended = batch.status in OVER
    counts = batch.request_counts
    made = MessageBatchCounts(processing=num_requests)
    if ended:
        failed = num_requests - counts.completed if batch.status == "failed" else counts.failed
        canceled = num_requests - counts.completed - failed
        made = MessageBatchCounts(
            succeeded=counts.completed, errored=failed - num_expired, canceled=canceled, expired=num_expired
        )
    over = (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if ended else "canceling" if batch.status == "cancelling" else "in_progress",
        request_counts=made,
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at or batch.created_at),
        ended_at=_time(next(moment for moment in over if moment is not None)) if ended else None,
        cancel_initiated_at=None if batch.cancelling_at is None else _time(batch.cancelling_at),
        results_url=results_url if ended else None,
    )


def result_of(line: bytes) -> tuple[str, bytes]:
    """The custom_id of a line of an output or error file, and its result."""
    given = msgspec.json.decode(line, type=BatchResult)
    name = given.custom_id or ""
    if given.response is not None and given.response.status_code == 200:
        return name, _result(name, {"type": "succeeded", "message": given.response.body})
    if given.response is not None:
        return name, _result(name, {"type": "errored", "error": given.response.body})
    if given.error is not None and given.error.code == EXPIRED:
        return name, _result(name, {"type": "expired"})
    message = "the request has no answer" if given.error is None else given.error.message
    error = {"type": "error", "error": {"type": "api_error", "message": message}}
    return name, _result(name, {"type": "errored", "error": error})


def name_of(line: bytes) -> str:
    """The custom_id of a line of an input file."""
    return msgspec.json.decode(line, type=BatchLine).custom_id


def canceled(name: str) -> bytes:
    return _result(name, {"type": "canceled"})


def _result(name: str, result: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": name, "result": result}) + b"\n"


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
