"""Ranks on one machine that meet in shared memory."""

from troupellm.kernels import meeting
from troupellm.kernels.meeting import Meeting
from troupellm.models.parallel.ranks import IDLE_SECONDS


class SharedMemoryRanks:
    """Implements `Ranks`."""

    def __init__(self, place: Meeting) -> None:
        self._meeting = place
        self.number, self.size, self.pointer = place.rank, place.ranks, place.pointer
        self.join, self.meet, self.sum_, self.check = place.join, place.meet, place.sum_, place.check
        self.tell, self.gather, self.close = place.tell, place.gather, place.close

    @classmethod
    def lead(cls, size: int, timeout: float) -> tuple["SharedMemoryRanks", str]:
        """The leader's, and the address by which others find it."""
        place = meeting.make(size, timeout)
        return cls(place), meeting.address(place)

    @classmethod
    def follow(cls, address: str, number: int, size: int, timeout: float) -> "SharedMemoryRanks":
        """Another rank's.

        Raises:
            RankLost: the leader is not there.
        """
        return cls(meeting.enter(address, number, size, timeout))

    def hear(self) -> bytes:
        """As `Ranks.hear`."""
        while (told := self._meeting.hear(IDLE_SECONDS)) is None:
            pass
        return told
