"""The rank processes of one model: the leader, which gets all messages, and the others, which get theirs from it."""

from collections.abc import Callable

import anyio
import msgspec

from troupellm.actors.runtime.processes import Processes
from troupellm.actors.worker.remote_worker import KILL_SECONDS, RemoteWorker
from troupellm.actors.worker.thread_host import WorkerGone
from troupellm.protocol.wire.worker import RANK_LOST, Failed, FromWorker, Leading, Load, RankPlace, ToWorker


class RankGroup(RemoteWorker):
    """As a `RemoteWorker`, the leader; it is gone when any rank is. No rank goes on without the others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._followers = tuple(Follower(self._wake) for _ in range(size - 1))
        self._load: Load | None = None
        self._waited = False
        """The leader has waited for another rank in vain."""

    async def open(self, processes: Processes) -> None:
        """Start all processes. Raises WorkerGone when one cannot be started; then there are none."""
        try:
            await super().open(processes)
            for follower in self._followers:
                await follower.open(processes)
        except BaseException:  # also when the caller is cancelled
            with anyio.CancelScope(shield=True):
                await self.end()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Of all ranks that were started."""
        return tuple(rank.child.pid for rank in (self, *self._followers) if rank.child is not None)

    def send(self, message: ToWorker) -> None:
        """To the leader. The others load when it says where they meet."""
        if isinstance(message, Load):
            self._load = message
            message = self._for_rank(message, 0)
        super().send(message)

    async def next(self) -> FromWorker:
        """The leader's next message, or the failure of another rank. Raises WorkerGone."""
        while True:
            for follower in self._followers:
                if (failed := follower.failure()) is not None:
                    return failed
            if self._messages:
                message = self._messages[0]
                if isinstance(message, Failed) and message.kind == RANK_LOST:
                    return await self._cause(message)  # it stays, in case this call is cancelled
                self._messages.popleft()
                if not isinstance(message, Leading):
                    return message
                self._load_followers(message.address)
            elif self._lost:
                raise await self.obituary()
            else:
                await self._told()

    @property
    def gone(self) -> bool:
        """True if any rank has closed its connection."""
        return self._closed or self._follower_gone

    @property
    def _follower_gone(self) -> bool:
        return any(follower.gone for follower in self._followers)

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped any rank."""
        return super().stopped or any(follower.stopped for follower in self._followers)

    def kill(self) -> None:
        """All ranks."""
        super().kill()
        for follower in self._followers:
            follower.kill()

    async def end(self) -> bool:
        """Kill all ranks and wait until they are gone; False if one does not go."""
        self.kill()
        ended = [await super().end(), *[await follower.end() for follower in self._followers]]
        return all(ended)

    async def obituary(self) -> WorkerGone:
        """Why a rank is of no more use, with its number."""
        for number, follower in enumerate(self._followers, 1):
            if follower.ended_first and (self._waited or not self._closed):
                gone = await follower.obituary()
                return WorkerGone(f"rank {number}: {gone.message}", fault=gone.fault, exhausted=gone.exhausted)
        waited = [(number, follower.waited) for number, follower in enumerate(self._followers, 1) if follower.waited]
        if waited and not self._closed:  # for a rank that is there
            return WorkerGone("rank {}: {}".format(*waited[0]))
        return await super().obituary()

    async def _cause(self, failed: Failed) -> Failed:
        """The leader has waited for a rank in vain: that one's own failure, if it has one.

        Raises:
            WorkerGone: a rank is gone.
        """
        self._waited = True
        while not self._follower_gone:
            for follower in self._followers:
                if (own := follower.failure()) is not None:
                    return own
            if not await self._told(KILL_SECONDS):
                raise WorkerGone(failed.message)
        raise await self.obituary()

    def _load_followers(self, address: str) -> None:
        assert self._load is not None
        for number, follower in enumerate(self._followers, 1):
            follower.send(self._for_rank(self._load, number, address))

    def _for_rank(self, load: Load, number: int, address: str = "") -> Load:
        place = RankPlace(number=number, size=1 + len(self._followers), address=address)
        return msgspec.structs.replace(load, place=place)


class Follower(RemoteWorker):
    """A rank beside the leader. It says nothing, unless it fails."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """changed: called when the process says something, or is gone."""
        super().__init__()
        self._changed = changed
        self.waited = ""
        """Which other rank it has waited for in vain."""

    @property
    def ended_first(self) -> bool:
        """True if it is gone, and not because another rank was."""
        return self.gone and not self.waited

    def failure(self) -> Failed | None:
        """Why it could not go on, unless the reason is that another rank is gone."""
        found = [message for message in self._messages if isinstance(message, Failed)]
        self._messages.clear()
        if found and found[0].kind == RANK_LOST:
            self.waited = found[0].message
            return None
        return found[0] if found else None

    def _wake(self) -> None:
        self._changed()
