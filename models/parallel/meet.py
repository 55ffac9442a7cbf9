"""How the ranks of a model find each other."""

from troupellm.kernels import meeting
from troupellm.models.parallel.gloo import SCHEME, GlooRanks
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.parallel.shared_memory import SharedMemoryRanks
from troupellm.protocol.config.engine import EngineConfig


def lead(size: int, timeout: float) -> tuple[Ranks, str]:
    """The leader's view, and the address for `follow`.

    Args:
        timeout: seconds of one wait for another rank; 0 is none.
    """
    return SharedMemoryRanks.lead(size, timeout) if meeting.available() else GlooRanks.lead(size, timeout)


def follow(address: str, number: int, size: int, timeout: float) -> Ranks:
    """Another rank's view.

    Raises:
        RankLost: the leader is not there.
    """
    if address.startswith(SCHEME):
        return GlooRanks.follow(address, number, size, timeout)
    return SharedMemoryRanks.follow(address, number, size, timeout)


def seconds(config: EngineConfig) -> float:
    """How long a rank waits for another one; 0 is for ever."""
    said = config.parallel.distributed_timeout_seconds
    return (config.worker.step_deadline or 0.0) if said is None else said
