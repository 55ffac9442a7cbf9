"""The runner: works on the batches of one folder, beside an engine in this process.

Owns:      the folder, which no second runner may have.
Receives:  nothing; it looks into the folder, where other API processes write too.
Sends:     requests to the engine, through the routes, as many as its governor lets in.
On crash:  a batch that cannot go on for want of a disk is tried again; a bug fails its batch and is logged.
"""

import fcntl
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from troupellm.protocol.config.engine import ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.base.errors import HttpError, flatten
from troupellm.server.base.router import Route
from troupellm.server.batches.concurrency import Governor, Share
from troupellm.server.batches.job import Job
from troupellm.server.batches.progress import Entry, Progress, unfinished, whole_batch
from troupellm.server.host.internal_requests import Inside
from troupellm.server.host.served_engine import ServedEngine
from troupellm.server.host.server_state import ServerState
from troupellm.server.storage.batches import Store
from troupellm.server.storage.batches_rows import CONTENT, INCOMING, LOCK, SCHEMA, open_folder
from troupellm.server.storage.database import told_as_config_error

logger = logging.getLogger("troupellm.server")

LOOK_SECONDS = 0.5
RETRY_SECONDS = 5.0
"""Before a batch that the disk has stopped is tried again."""
PURGE_LOOKS = 120
"""Expired files are removed once in so many looks."""
MOST_ACTIVE = 8
"""Batches at once, or one of each owner if those are more; owners take turns."""


class Runner:
    """Works until it is cancelled; what it was at is taken up again by the next one."""

    def __init__(self, store: Store, inside: Inside, engine: ServedEngine, owners: Mapping[str, str]) -> None:
        """owners: those that the gate knows, and their names."""
        self._store = store
        self._inside = inside
        self._owners = owners
        self._most = {tenant.name: tenant.max_concurrency for tenant in engine.config.scheduler.tenants}
        self._governor = Governor(engine, store.config.batch_concurrency)
        self._shares: dict[str, Share] = {}
        self._active: dict[int, Job] = {}
        self._unwanted: set[int] = set()
        """Batches that were told of once."""

    async def run(self) -> None:
        looks = 0
        async with anyio.create_task_group() as group:
            while True:
                try:
                    self._follow(await unfinished(self._store), group)
                    if looks % PURGE_LOOKS == 0:
                        await self._store.purge()
                except HttpError:  # the disk; told already
                    await anyio.sleep(RETRY_SECONDS)
                looks += 1
                await anyio.sleep(LOOK_SECONDS)

    def _follow(self, entries: list[Entry], group: TaskGroup) -> None:
        """Start as many batches as there is room for, the owner with the least at work first; stop cancelled ones.

        Every owner has a place: no owner waits for the end of another one's batches.
        """
        for entry in entries:
            job = self._active.get(entry.number)
            if job is not None and (entry.batch.status == "cancelling" or entry.expired):
                job.cancel()
        waiting = [entry for entry in entries if entry.number not in self._active and self._is_wanted(entry)]
        while waiting:
            at_work = Counter(job.entry.owner for job in self._active.values())
            entry = min(waiting, key=lambda entry: (at_work[entry.owner], entry.number))
            if at_work[entry.owner] and len(self._active) >= MOST_ACTIVE:
                break
            waiting.remove(entry)
            tenant = self._owners.get(entry.owner, "")
            share = self._shares.setdefault(entry.owner, self._governor.share(self._most.get(tenant)))
            job = Job(entry, self._store, self._inside, share, tenant=tenant)
            self._active[entry.number] = job
            group.start_soon(self._work, job)

    def _is_wanted(self, entry: Entry) -> bool:
        """For a key that was taken away nothing is asked: its batches wait for it to come back, or for their end."""
        if entry.owner in self._owners or entry.expired or entry.batch.status in ("finalizing", "cancelling"):
            return True
        if entry.number not in self._unwanted:
            self._unwanted.add(entry.number)
            logger.warning("batch %s waits: nobody has its API key any more", entry.batch.id)
        return False

    async def _work(self, job: Job) -> None:
        batch = job.entry.batch
        try:
            await job.run()
            logger.info("batch %s is over", batch.id)
        except (Exception, BaseExceptionGroup) as error:
            await self._fail(job, flatten(error))
        finally:
            self._active.pop(job.entry.number, None)

    async def _fail(self, job: Job, error: BaseException) -> None:
        try:
            if isinstance(error, HttpError):
                raise error
            logger.error("batch %s has failed", job.entry.batch.id, exc_info=error)
            errors = whole_batch("internal_error", "internal error")
            await Progress(self._store, job.entry).set_status("failed", errors=errors)
        except HttpError:  # the disk; told already
            await anyio.sleep(RETRY_SECONDS)


@contextmanager
def held_folder(config: ServerConfig) -> Iterator[None]:
    """Have the folder for this process alone, without half-written and unknown files of an earlier one.

    Raises:
        ConfigError: it cannot be used, or another server uses it.
    """
    if config.files_dir is None:
        yield
        return
    folder = Path(config.files_dir)
    with ExitStack() as stack:
        with told_as_config_error(SCHEMA.setting, folder), closing(open_folder(folder)) as database:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                message = f"{SCHEMA.setting}: another server uses {folder.name}"
                raise ConfigError(message, param=SCHEMA.setting) from None
            known = {name for (name,) in database.execute("SELECT id FROM files")}
            unknown = [path for path in (folder / CONTENT).iterdir() if path.name not in known]
            for path in (*(folder / INCOMING).iterdir(), *unknown):
                path.unlink(missing_ok=True)
        yield


@asynccontextmanager
async def running_batches(
    engine: ServedEngine, config: ServerConfig, routes: Iterable[Route], host: ServerState, owners: Mapping[str, str]
) -> AsyncIterator[None]:
    """Inside the block the folder's batches are worked on; leaving it drops the lines in flight, to be asked again.

    Args:
        routes: what lines may ask for, bound to `host`.
        owners: those that the gate knows, and the names that they have now.
    """
    if config.files_dir is None:
        yield
        return
    runner = Runner(host.batches.store, Inside(host, routes), engine, owners)
    async with anyio.create_task_group() as group:
        group.start_soon(runner.run)
        host.batches.runs = True
        try:
            yield
        finally:
            host.batches.runs = False
            group.cancel_scope.cancel()
