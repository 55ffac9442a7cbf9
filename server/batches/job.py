"""One batch, from its input file to its output files. A line with an answer is never run again."""

import math
from collections.abc import Awaitable, Callable
from typing import BinaryIO

import anyio

from troupellm.protocol.api.batches import BatchError, BatchErrors, BatchResult
from troupellm.protocol.api.caller import Caller
from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.base.threads import offload
from troupellm.server.batches.lines import Bad, Checker, Good, Lines, count_lines, failed
from troupellm.server.batches.owner_share import Share
from troupellm.server.batches.progress import Entry, Progress
from troupellm.server.batches.run_line import ask
from troupellm.server.host.internal_requests import Inside
from troupellm.server.storage.batches import Store


class Job:
    """`run` ends when the batch is over. `cancel` and `expire` end the asking, and it goes on to its output files."""

    def __init__(
        self, entry: Entry, store: Store, inside: Inside, share: Share, config: ServerConfig, *, tenant: str
    ) -> None:
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
        self._longest = config.max_body_bytes
        self._most = config.max_batch_lines
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
        try:
            with await offload(self._open) as source:
                self._total = await offload(count_lines, source, self._most)
        except FileNotFoundError:
            return _errors("invalid_file", "the input file is not there any more")
        except OSError as error:
            raise self._store.refused(error) from error
        if not self._total:
            return _errors("empty_file", "the input file has no requests")
        if self._total > self._most:
            return _errors("too_many_requests", f"a batch may have at most {self._most} requests")
        return None

    async def _ask(self) -> None:
        """Have every line answered that is not yet. No more of them are in memory than its owner may have out."""
        done = await self._progress.answered()
        async with anyio.create_task_group() as group:

            async def take(line: Good | Bad) -> None:
                if line.number in done:
                    return
                if isinstance(line, Bad):
                    await self._progress.put(line.number, line.result)
                    return
                await self._share.claim()
                try:
                    await self._share.enter()
                except BaseException:
                    self._share.release()
                    raise
                group.start_soon(self._ask_for, line)

            await self._for_each(take)

    async def _ask_for(self, line: Good) -> None:
        try:
            await ask(self._inside, line, self._share, self._progress.put, caller=self._caller)
        finally:
            self._share.release()

    async def _give_up(self) -> None:
        """Write an error for each line without an answer in time."""
        done = await self._progress.answered()

        async def take(line: Good | Bad) -> None:
            if line.number not in done:
                results.append((line.number, line.result if isinstance(line, Bad) else _too_late(line.custom_id)))

        results: list[tuple[int, BatchResult]] = []
        await self._for_each(take)
        await self._progress.put_all(results)

    async def _for_each(self, take: Callable[[Good | Bad], Awaitable[None]]) -> None:
        """Every line of the input, in order; read and checked off the event loop."""
        checker = Checker(self._inside.urls, endpoint=self.entry.batch.endpoint, longest=self._longest)
        try:
            with await offload(self._open) as source:
                lines = Lines(source, self._longest)
                while group := await offload(_check, lines, checker):
                    for line in group:
                        await take(line)
        except OSError as error:
            raise self._store.refused(error) from error

    def _open(self) -> BinaryIO:
        return self._store.content(self.entry.batch.input_file_id).open("rb")


def _check(lines: Lines, checker: Checker) -> list[Good | Bad]:
    return [checker.check(line) for line in lines.read()]


def _too_late(custom_id: str) -> BatchResult:
    return failed(custom_id, "batch_expired", "this request was not answered before the completion window was over")


def _errors(code: str, message: str) -> BatchErrors:
    return BatchErrors(data=[BatchError(code=code, message=message)])
