"""Ranks meet in shared memory: sums in the order of ranks, told bytes, gathered parts, and ranks that end."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from troupellm.kernels import meeting
from troupellm.kernels.meeting import CAPACITY, Meeting, RankLost

pytestmark = pytest.mark.skipif(not meeting.available(), reason="ranks meet in shared memory with compiled code alone")
SECONDS = 20.0


def places(size: int, timeout: float = SECONDS) -> list[Meeting]:
    """All ranks' places, of one process."""
    leader = meeting.make(size, timeout)
    return [leader, *(meeting.enter(meeting.address(leader), rank, size, timeout) for rank in range(1, size))]


def together(size: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """The results of all ranks; each runs on a thread of its own."""
    found: list[Any] = [None] * size
    given = places(size)

    def run(place: Meeting) -> None:
        place.join()
        found[place.rank] = work(place)

    threads = [threading.Thread(target=run, args=(place,)) for place in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for place in given:
        place.close()
    return found


def numbers(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("rows", [1, 8, 2 * CAPACITY // 64 + 5])
def test_every_rank_has_the_bits_of_the_sum_in_the_order_of_ranks(size: int, rows: int) -> None:
    def work(place: Meeting) -> list[torch.Tensor]:
        sums = []
        for turn in range(4):
            part = numbers(10 * turn + place.rank, rows, 64)
            place.sum_(part)
            sums.append(part)
        return sums

    found = together(size, work)
    for turn in range(4):
        expected = numbers(10 * turn, rows, 64)
        for rank in range(1, size):
            expected += numbers(10 * turn + rank, rows, 64)
        assert all(torch.equal(sums[turn], expected) for sums in found)


def test_halves_are_added_up_in_float32() -> None:
    def work(place: Meeting) -> torch.Tensor:
        part = numbers(place.rank, 3, 16).bfloat16()
        place.sum_(part)
        return part

    found = together(3, work)
    expected = sum(numbers(rank, 3, 16).bfloat16().float() for rank in range(3))
    assert all(torch.equal(part, torch.as_tensor(expected).bfloat16()) for part in found)


def test_the_others_hear_what_the_leader_tells_between_sums() -> None:
    texts = [b"", b"a", os.urandom(9 * CAPACITY), b"end"]

    def work(place: Meeting) -> list[bytes | None]:
        heard = []
        for text in texts:
            if place.rank == 0:
                place.tell(text)
            else:
                heard.append(place.hear(SECONDS))
            place.sum_(torch.ones(2, 2, dtype=torch.float32))
        return heard

    _, *others = together(3, work)
    assert others == [texts, texts]


@pytest.mark.parametrize("rows", [1, 5, 3 * CAPACITY // 100])
def test_the_leader_gathers_parts_of_uneven_widths(rows: int) -> None:
    widths = (100, 33, 101)

    def work(place: Meeting) -> torch.Tensor | None:
        out = None if place.rank else torch.empty(rows, sum(widths), dtype=torch.float32)
        for turn in range(3):
            place.gather(numbers(10 * turn + place.rank, rows, widths[place.rank]), widths, out)
        return out

    leader, *_ = together(3, work)
    assert torch.equal(leader, torch.cat([numbers(20 + rank, rows, width) for rank, width in enumerate(widths)], dim=1))


def test_a_rank_that_hears_nothing_says_so_in_time() -> None:
    leader, other = places(2)
    other._pids[:] = os.getpid()
    other.join()
    assert other.hear(0.01) is None
    leader.tell(b"late")
    assert other.hear(SECONDS) == b"late"
    leader.close()
    other.close()


def test_a_rank_that_does_not_come_to_a_sum_is_named() -> None:
    leader, other = places(2, timeout=0.2)
    other._pids[:] = os.getpid()
    leader.join()
    with pytest.raises(RankLost, match=r"^rank 1 has not come to a sum within 0\.2 s$"):
        leader.sum_(torch.ones(1, 1, dtype=torch.float32))
    leader.close()
    other.close()


def test_a_rank_that_is_missing_at_the_start_is_named() -> None:
    leader = meeting.make(3, SECONDS)
    with pytest.raises(RankLost, match=r"^rank 1, 2 of 3 has not come to the shared memory within 0\.02 s$"):
        leader.join(0.02)
    leader.close()


PEER = """
import sys
from troupellm.kernels import meeting
place = meeting.enter(sys.argv[1], 1, 2, 0)
place.join()
print("there", flush=True)
place.hear(60.0)
"""


@pytest.fixture
def peer() -> Iterator[tuple[Meeting, subprocess.Popen[bytes]]]:
    """The leader, and rank 1 in a process of its own."""
    leader = meeting.make(2, 0.0)
    process = subprocess.Popen([sys.executable, "-c", PEER, meeting.address(leader)], stdout=subprocess.PIPE)
    try:
        leader.join()
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        yield leader, process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        leader.close()


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_wait(peer: tuple[Meeting, "subprocess.Popen[bytes]"]) -> None:
    leader, process = peer
    process.kill()
    with pytest.raises(RankLost, match="^rank 1 has ended$"):
        leader.sum_(torch.ones(1, 1, dtype=torch.float32))


def test_a_system_that_refuses_a_call_has_no_shared_memory_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    meeting._system_supports.cache_clear()
    try:
        assert not meeting.available()
    finally:
        meeting._system_supports.cache_clear()


def test_the_memory_of_another_size_or_address_is_refused() -> None:
    leader = meeting.make(2, SECONDS)
    with pytest.raises(RankLost, match="is not that of 3 ranks|cannot open"):
        meeting.enter(meeting.address(leader), 1, 3, SECONDS)
    leader.close()
    with pytest.raises(RankLost, match="^rank 1 cannot open the leader's memory at "):
        meeting.enter("/proc/self/fd/99999", 1, 2, SECONDS)
