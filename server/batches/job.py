"""One batch, from its input file to its output files. A line with an answer is never run again."""

import math
from collections.abc import AsyncGenerator, Container
from contextlib import aclosing
from typing import BinaryIO

import anyio

from troupellm.protocol.api.batches import BatchErrors
from troupellm.protocol.api.caller import Caller
from troupellm.server.base.threads import offload
from troupellm.server.batches.concurrency import Share
from troupellm.server.batches.lines import Bad, Good, Lines, answer_lines, count_lines, failed
from troupellm.server.batches.progress import Entry, Progress, whole_batch
from troupellm.server.host.internal_requests import Inside
from troupellm.server.storage.batches import Store

_TOO_LATE = "this request was not answered before the completion window was over"


class Job:
    """`run` ends when the batch is over. `cancel` and `expire` end the asking, and it goes on to its output files."""

    def __init__(self, entry: Entry, store: Store, inside: Inside, share: Share, *, tenant: str) -> None:
        """
        Args:
            share: of its owner.
            tenant: the owner's name now.
        """
        self.entry = entry
        self._store = store
        self._inside = inside
        self._share = share
        self._caller = Caller(tenant, entry.owner)
        self._progress = Progress(store, entry)
        self._asking = anyio.CancelScope()
        self._total = 0

    def cancel(self) -> None:
        """Nothing more is asked for it."""
        self._asking.cancel()

    async def run(self) -> None:
        """
        Raises:
            HttpError: the disk refuses; what is written down is whole, and another run goes on from there.
        """
        batch = self.entry.batch
        if batch.status == "validating":
            errors = await self._validate()
            if errors is not None:
                await self._progress.set_status("failed", errors=errors)
                return
            batch = await self._progress.set_status("in_progress", total=self._total)
        if batch.status == "in_progress":
            if not self.entry.expired:
                with self._asking:
                    await self._ask()
            if self.entry.expired:
                await self._give_up()
            batch = await self._progress.set_status("finalizing")
        if batch.status == "cancelling":
            await self._progress.finish("cancelled")
            return
        late = (batch.finalizing_at or 0) >= (batch.expires_at or math.inf)
        await self._progress.finish("expired" if late else "completed")

    async def _validate(self) -> BatchErrors | None:
        """Count the lines; why there is nothing to do, if so."""
        most = self._store.config.max_batch_lines
        try:
            with await offload(self._open) as source:
                self._total = await offload(count_lines, source, most)
        except FileNotFoundError:
            return whole_batch("invalid_file", "the input file is not there any more")
        except OSError as error:
            raise self._store.refused(error) from error
        if not self._total:
            return whole_batch("empty_file", "the input file has no requests")
        if self._total > most:
            return whole_batch("too_many_requests", f"a batch may have at most {most} requests")
        return None

    async def _ask(self) -> None:
        """Have every line answered that is not yet."""
        async with aclosing(self._lines(await self._progress.answered())) as lines:
            await answer_lines(self._inside, lines, self._share, self._progress.put, caller=self._caller)

    async def _give_up(self) -> None:
        """Write an error for each line without an answer in time."""
        results = [
            (line.number, line.result if isinstance(line, Bad) else failed(line.custom_id, "batch_expired", _TOO_LATE))
            async for line in self._lines(await self._progress.answered())
        ]
        await self._progress.put_all(results)

    async def _lines(self, done: Container[int]) -> AsyncGenerator[Good | Bad, None]:
        """The lines of the input that are not done, in order; read and checked off the event loop."""
        try:
            with await offload(self._open) as source:
                endpoint = self.entry.batch.endpoint
                lines = Lines(source, self._inside.urls, endpoint=endpoint, longest=self._store.config.max_body_bytes)
                while group := await offload(lines.read):
                    for line in group:
                        if line.number not in done:
                            yield line
        except OSError as error:
            raise self._store.refused(error) from error

    def _open(self) -> BinaryIO:
        return self._store.content(self.entry.batch.input_file_id).open("rb")
