"""Which graph a step gets, and in what order graphs are captured."""

import pytest

from troupellm.models.gpu.graph_dispatch import BatchDescriptor, Dispatcher, GraphKey, default_sizes
from troupellm.models.gpu.sampling_tensors import CUT, DRAWN, GREEDY


def decode(requests: int) -> BatchDescriptor:
    return BatchDescriptor(tokens=requests, requests=requests, uniform=True)


def test_the_default_sizes_are_close_where_batches_are_small_and_end_where_nothing_larger_comes() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(3) == (1, 2, 4)
    assert default_sizes(20) == (1, 2, 4, 8, 16, 24)
    assert default_sizes(256) == (1, 2, 4, *range(8, 257, 8))
    assert default_sizes(4096) == (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    assert len(default_sizes(256)) == 35


def test_a_step_gets_the_next_larger_size() -> None:
    dispatcher = Dispatcher((4, 1, 8))
    assert dispatcher.key(decode(1)) == GraphKey(1)
    assert dispatcher.key(decode(2)) == GraphKey(4)
    assert dispatcher.key(decode(8), DRAWN) == GraphKey(8, kind=DRAWN)
    assert dispatcher.key(decode(9)) is None


@pytest.mark.parametrize(
    "batch",
    [
        BatchDescriptor(tokens=5, requests=2, uniform=False),
        BatchDescriptor(tokens=4, requests=2, uniform=True),
        BatchDescriptor(tokens=2, requests=2, uniform=True, adapters=True),
        BatchDescriptor(tokens=0, requests=0, uniform=True),
    ],
)
def test_what_has_no_graph_is_eager(batch: BatchDescriptor) -> None:
    assert Dispatcher((1, 2, 4)).key(batch) is None


def test_no_sizes_are_no_graphs() -> None:
    dispatcher = Dispatcher(())
    assert dispatcher.key(decode(1)) is None
    assert dispatcher.next_capture() is None


def test_drafts_are_verified_by_graphs_of_their_own() -> None:
    dispatcher = Dispatcher((2,), queries=(1, 5))
    assert dispatcher.key(BatchDescriptor(10, 2, uniform=True)) == GraphKey(2, 5)
    assert dispatcher.key(BatchDescriptor(6, 2, uniform=True)) is None


def test_drafts_of_different_numbers_share_a_graph_where_padding_costs_little() -> None:
    dispatcher = Dispatcher((1, 4, 16, 64), queries=(1, 6), draws=False)

    def key(counts: list[int], *, pads: bool = True) -> GraphKey | None:
        batch = BatchDescriptor(sum(counts), len(counts), uniform=len(set(counts)) == 1)
        return dispatcher.verifying(batch, max(counts), pads=pads)

    assert key([6, 6, 6]) == key([6, 2, 1]) == key([3, 3]) == GraphKey(4, 6)
    assert key([1, 1]) == GraphKey(4)
    assert key([6, 6, 6], pads=False) == GraphKey(4, 6)
    assert key([6, 2, 1], pads=False) is None
    assert key([3, 3], pads=False) is None
    assert key([7, 7]) is None  # longer than any
    assert key([4] * 12) == GraphKey(16, 6)
    assert key([2] * 12) is None  # three times as many tokens
    assert key([6] * 64) is None  # more than logits are kept of
    assert dispatcher.most_tokens == 96
    order = captured_in_turn(dispatcher)
    assert order[:2] == [GraphKey(16, 6), GraphKey(64)]  # something for each kind of step
    assert not any(found.kind for found in order)


def captured_in_turn(dispatcher: Dispatcher) -> list[GraphKey]:
    order = []
    while (found := dispatcher.next_capture()) is not None:
        dispatcher.add(found)
        order.append(found)
    assert dispatcher.missing == 0
    return order


def test_the_largest_is_captured_first_then_what_steps_asked_for_last_then_the_others() -> None:
    dispatcher = Dispatcher((1, 2, 4, 8))
    for wanted in (GraphKey(2), GraphKey(1), GraphKey(2, kind=DRAWN), GraphKey(2, kind=DRAWN)):
        dispatcher.want(wanted)
    asked = [GraphKey(2, kind=DRAWN), GraphKey(1), GraphKey(2)]
    assert captured_in_turn(dispatcher) == [GraphKey(8), *asked, GraphKey(4)]


def test_graphs_that_draw_are_captured_where_a_step_has_drawn() -> None:
    dispatcher = Dispatcher((1, 2))
    assert captured_in_turn(dispatcher) == [GraphKey(2), GraphKey(1)]
    for kind in (DRAWN, CUT):
        dispatcher.want(GraphKey(2, kind=kind))
        dispatcher.want(GraphKey(2))
        assert captured_in_turn(dispatcher) == [GraphKey(2, kind=kind)]


def test_the_graph_with_the_fewest_rows_that_pad_stands_in() -> None:
    dispatcher = Dispatcher((1, 2, 4, 8), queries=(1, 5))
    one, drawn = GraphKey(1), GraphKey(1, kind=DRAWN)
    assert dispatcher.stand_in(one) is None
    for found, expected in ((GraphKey(8), 8), (GraphKey(4), 4), (GraphKey(8, kind=DRAWN), 4), (GraphKey(4, 5), 4)):
        dispatcher.want(found)
        dispatcher.add(found)
        assert dispatcher.stand_in(one) == dispatcher.stand_in(drawn) == GraphKey(expected)
    assert dispatcher.stand_in(GraphKey(8, kind=DRAWN)) == GraphKey(8, kind=DRAWN)
    assert dispatcher.stand_in(GraphKey(2, 5)) == GraphKey(4, 5)
    assert dispatcher.stand_in(GraphKey(8, 5)) is None


def test_what_draws_less_than_is_asked_for_stands_in_and_nothing_that_draws_more() -> None:
    dispatcher = Dispatcher((1, 2))
    for kind, able in ((CUT, {CUT}), (DRAWN, {DRAWN, CUT}), (GREEDY, {GREEDY, DRAWN, CUT})):
        key = GraphKey(1, kind=kind)
        dispatcher.want(key)
        while dispatcher.next_capture() != key:
            dispatcher._waiting.pop(0)
        dispatcher.add(key)
        found = {asked: dispatcher.stand_in(GraphKey(1, kind=asked)) for asked in (GREEDY, DRAWN, CUT)}
        assert {asked for asked, one in found.items() if one} == able
        assert found[kind] == key


def test_of_equal_graphs_that_do_not_draw_so_much_the_one_that_does_least_stands_in() -> None:
    dispatcher = Dispatcher((1,))
    for key in (GraphKey(1, kind=DRAWN), GraphKey(1)):
        dispatcher.want(key)
        dispatcher.next_capture()
        dispatcher.add(key)
    assert dispatcher.stand_in(GraphKey(1, kind=CUT)) == GraphKey(1)


def test_graphs_that_are_gone_are_captured_again() -> None:
    dispatcher = Dispatcher((1, 2))
    captured_in_turn(dispatcher)
    assert dispatcher.stand_in(GraphKey(2)) == GraphKey(2)
    dispatcher.forget()
    assert dispatcher.stand_in(GraphKey(2)) is None
    assert (dispatcher.missing, dispatcher.captured) == (2, 0)
    assert dispatcher.next_capture() == GraphKey(2)
