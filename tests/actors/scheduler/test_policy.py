"""The waiting queue's order."""

from array import array
from random import Random

import pytest

from troupellm.actors.scheduler.fair_share import FairShare
from troupellm.actors.scheduler.waiting_queue import WaitingQueue, arrival_key
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


def drain(waiting_queue: WaitingQueue) -> list[int]:
    rows = []
    while (sequence := waiting_queue.first()) is not None:
        rows.append(sequence.row)
        waiting_queue.remove(sequence)
    return rows


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3, 4]), ("priority", [3, 2, 4, 1])])
def test_sequences_are_served_in_the_order_of_the_policy(policy: str, order: list[int]) -> None:
    waiting_queue = WaitingQueue(FairShare())
    for ordinal, priority in ((4, 1), (2, 0), (1, 5), (3, -1)):
        waiting_queue.add(waiting(policy, priority, ordinal))
    assert drain(waiting_queue) == order
    assert (waiting_queue.size, waiting_queue.num_tokens) == (0, 0)


def test_a_request_that_returns_to_the_queue_is_served_before_later_arrivals() -> None:
    waiting_queue = WaitingQueue(FairShare())
    first, second = waiting("fcfs", 0, 1), waiting("fcfs", 0, 2)
    waiting_queue.add(first)
    waiting_queue.add(second)
    waiting_queue.remove(first)
    first.tokens.append(4)
    waiting_queue.add(first)
    assert waiting_queue.num_tokens == 7
    assert drain(waiting_queue) == [1, 2]


def test_removal_is_idempotent_and_nobody_waits_twice() -> None:
    waiting_queue = WaitingQueue(FairShare())
    one = waiting("fcfs", 0, 1)
    waiting_queue.remove(one)
    waiting_queue.add(one)
    with pytest.raises(ValueError, match="waits already"):
        waiting_queue.add(one)
    waiting_queue.remove(one)
    waiting_queue.remove(one)
    assert one not in waiting_queue
    assert waiting_queue.first() is None


def test_removed_entries_do_not_pile_up_behind_a_blocked_head() -> None:
    waiting_queue = WaitingQueue(FairShare())
    waiting_queue.add(waiting("fcfs", 0, 0))
    for ordinal in range(1, 1000):
        gone = waiting("fcfs", 0, ordinal)
        waiting_queue.add(gone)
        waiting_queue.remove(gone)
    assert len(waiting_queue._lines[""]._heap) < 100
    assert drain(waiting_queue) == [0]


def test_the_tenant_served_least_comes_first_whatever_is_promised_and_decided() -> None:
    source = Random(7)
    fair_share = FairShare()
    waiting_queue = WaitingQueue(fair_share)
    away: list[Sequence] = []
    inside: dict[str, list[Sequence]] = {}
    for ordinal in range(4000):
        turn = source.random()
        if turn < 0.4 or not inside:
            one = waiting("fair", 0, ordinal, tenant=source.choice("abcdefgh"))
            inside.setdefault(one.request.tenant, []).append(one)
            waiting_queue.add(one)
        elif turn < 0.6 and away:
            one = away.pop(source.randrange(len(away)))
            waiting_queue.come_back(one)
            if source.random() < 0.7:
                waiting_queue.add(one)
                inside.setdefault(one.request.tenant, []).append(one)
        else:
            first = waiting_queue.first()
            assert first is not None
            assert fair_share.served(first.request.tenant) == min(map(fair_share.served, inside))
            assert first is min(inside[first.request.tenant], key=lambda one: one.arrival_key)
            inside[first.request.tenant].remove(first)
            if not inside[first.request.tenant]:
                del inside[first.request.tenant]
            if turn < 0.8:
                waiting_queue.go_out(first, source.randint(0, 60))
                away.append(first)
            else:
                waiting_queue.remove(first)
                fair_share.charge(first.request.tenant, source.randint(1, 20))
        assert (waiting_queue.size, waiting_queue.num_away) == (sum(map(len, inside.values())), len(away))
        assert len(waiting_queue._order) <= 2 * 8 + 66
    for one in away:
        waiting_queue.come_back(one)
    assert not fair_share._promised
