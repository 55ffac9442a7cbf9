"""The life-cycle table."""

import itertools
from array import array

import pytest
from oracle import submission

from troupellm.actors.sequences.sequence import TRANSITIONS, Event, LifecycleError, Request, Sequence, State
from troupellm.protocol.messages.worker import SamplingState


def sequence(tokens: int = 3) -> Sequence:
    message = submission(1, list(range(tokens)))
    request = Request(message, [])
    return Sequence(
        request, 100, SamplingState(), array("i", range(tokens)), message, limit=9, num_groups=1, arrival_key=(0, 0, 0)
    )


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_an_event_has_a_row_or_raises(state: State, event: Event) -> None:
    one = sequence()
    one.state = state
    expected = TRANSITIONS.get((state, event))
    if expected is None:
        with pytest.raises(LifecycleError, match=f"{state.value} and got {event.value}"):
            one.handle(event)
        assert one.state is state
    else:
        one.handle(event)
        assert one.state is expected


def test_every_live_state_can_end_and_only_ended_ones_are_released() -> None:
    for event in (Event.STOP, Event.ABORT, Event.FAIL):
        ends = {state for state, handled in TRANSITIONS if handled is event}
        assert ends == set(State) - {State.FINISHING, State.FINISHED}
    assert [state for state, event in TRANSITIONS if event is Event.RELEASE] == [State.FINISHING]
    assert not [event for state, event in TRANSITIONS if state is State.FINISHED]


def test_every_state_can_be_reached() -> None:
    reached = {State.WAITING}
    for _ in State:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(State)


def test_a_preempted_sequence_keeps_its_tokens_and_rises_an_epoch() -> None:
    one = sequence()
    one.tokens.append(7)
    one.num_computed, one.capacity, one.tables, one.decoding = 3, 4, [[5]], True
    one.reset_no_check()
    assert one.no_check_until == 4
    one.forget_computation()
    assert (one.epoch, one.num_computed, one.capacity, one.no_check_until, one.tables) == (1, 0, 0, -1, [[]])
    assert one.tokens.tolist() == [0, 1, 2, 7]
    assert (one.num_prompt_tokens, one.num_generated) == (3, 1)
