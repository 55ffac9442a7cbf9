"""Whole answers for code that follows streams."""

from troupellm.protocol.params.chat_events import (
    CallArguments,
    CallStart,
    Content,
    Finished,
    Reasoning,
    TurnChoice,
    TurnEvent,
)


def chunks_of(choice: TurnChoice) -> list[TurnEvent]:
    """A whole answer as a stream that brings it in one go."""
    events = []
    if choice.reasoning:
        events.append(TurnEvent(0, Reasoning(choice.reasoning)))
    if choice.content is not None:
        events.append(TurnEvent(0, Content(choice.content), choice.token_ids, choice.logprobs))
    for number, call in enumerate(choice.tool_calls):
        events.append(TurnEvent(0, CallStart(number, call.id, call.name)))
        events.append(TurnEvent(0, CallArguments(number, call.arguments)))
    events.append(TurnEvent(0, Finished(choice.finish_reason, choice.stop_reason)))
    return events
