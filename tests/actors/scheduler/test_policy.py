"""The waiting room's order."""

from array import array
from random import Random

import pytest

from troupellm.actors.scheduler.fair_share import Shares
from troupellm.actors.scheduler.waiting_queue import WaitingRoom, arrival_key
from troupellm.actors.sequences.sequence import Request, Sequence
from troupellm.protocol.messages.worker import SamplingState
from troupellm.tests.support.scheduler.oracle import submission


def waiting(policy: str, priority: int, ordinal: int, index: int = 0, tenant: str = "") -> Sequence:
    message = submission(ordinal, [1, 2, 3])
    key = arrival_key(policy, priority, ordinal, index)
    return Sequence(
        Request(message, [], tenant=tenant),
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
def test_sequences_are_served_in_the_order_of_the_policy(policy: str, order: list[int]) -> None:
    room = WaitingRoom(Shares())
    for ordinal, priority in ((4, 1), (2, 0), (1, 5), (3, -1)):
        room.add(waiting(policy, priority, ordinal))
    assert drain(room) == order
    assert (room.size, room.num_tokens) == (0, 0)


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


def test_the_tenant_served_least_comes_first_whatever_is_promised_and_decided() -> None:
    source = Random(7)
    shares = Shares()
    room = WaitingRoom(shares)
    away: list[Sequence] = []
    inside: dict[str, list[Sequence]] = {}
    for ordinal in range(4000):
        turn = source.random()
        if turn < 0.4 or not inside:
            one = waiting("fair", 0, ordinal, tenant=source.choice("abcdefgh"))
            inside.setdefault(one.request.tenant, []).append(one)
            room.add(one)
        elif turn < 0.6 and away:
            one = away.pop(source.randrange(len(away)))
            room.come_back(one)
            if source.random() < 0.7:
                room.add(one)
                inside.setdefault(one.request.tenant, []).append(one)
        else:
            first = room.first()
            assert first is not None
            assert shares.served(first.request.tenant) == min(map(shares.served, inside))
            assert first is min(inside[first.request.tenant], key=lambda one: one.arrival_key)
            inside[first.request.tenant].remove(first)
            if not inside[first.request.tenant]:
                del inside[first.request.tenant]
            if turn < 0.8:
                room.go_out(first, source.randint(0, 60))
                away.append(first)
            else:
                room.remove(first)
                shares.charge(first.request.tenant, source.randint(1, 20))
        assert (room.size, room.num_away) == (sum(map(len, inside.values())), len(away))
        assert len(room._order) <= 2 * 8 + 66
    for one in away:
        room.come_back(one)
    assert not shares._promised
