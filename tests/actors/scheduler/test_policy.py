"""The waiting room's order."""

from array import array

import pytest
from oracle import submission

from troupellm.actors.scheduler.policy import WaitingRoom, arrival_key
from troupellm.actors.scheduler.sequence import Request, Sequence
from troupellm.actors.scheduler.shares import Shares
from troupellm.protocol.worker import SamplingState


def waiting(policy: str, priority: int, ordinal: int, index: int = 0) -> Sequence:
    message = submission(ordinal, [1, 2, 3])
    key = arrival_key(policy, priority, ordinal, index)
    return Sequence(
        Request(message, []),
        ordinal,
        SamplingState(),
        array("i", [1, 2, 3]),
        message,
        limit=9,
        num_groups=1,
        arrival_key=key,
    )


def drain(room: WaitingRoom) -> list[int]:
    rows = []
    while (sequence := room.first()) is not None:
        rows.append(sequence.row)
        room.remove(sequence)
    return rows


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3, 4]), ("priority", [3, 2, 4, 1])])
def test_order_of_service(policy: str, order: list[int]) -> None:
    room = WaitingRoom(Shares())
    for ordinal, priority in ((4, 1), (2, 0), (1, 5), (3, -1)):
        room.add(waiting(policy, priority, ordinal))
    assert drain(room) == order
    assert (len(room), room.num_tokens) == (0, 0)


def test_who_comes_back_is_served_before_later_arrivals() -> None:
    room = WaitingRoom(Shares())
    first, second = waiting("fcfs", 0, 1), waiting("fcfs", 0, 2)
    room.add(first)
    room.add(second)
    room.remove(first)
    first.tokens.append(4)
    room.add(first)
    assert room.num_tokens == 7
    assert drain(room) == [1, 2]


def test_removal_is_idempotent_and_nobody_waits_twice() -> None:
    room = WaitingRoom(Shares())
    one = waiting("fcfs", 0, 1)
    room.remove(one)
    room.add(one)
    with pytest.raises(ValueError, match="waits already"):
        room.add(one)
    room.remove(one)
    room.remove(one)
    assert one not in room
    assert room.first() is None


def test_removed_entries_do_not_pile_up_behind_a_blocked_head() -> None:
    room = WaitingRoom(Shares())
    room.add(waiting("fcfs", 0, 0))
    for ordinal in range(1, 1000):
        gone = waiting("fcfs", 0, ordinal)
        room.add(gone)
        room.remove(gone)
    assert len(room._lines[""]._heap) < 100
    assert drain(room) == [0]
