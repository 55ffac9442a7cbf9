"""The conversations that a chat template accepts, found by rendering small ones once for each template.

A conversation that began on another server or with another model must continue here too. Templates refuse some
conversations, or leave out a part; `message_forms` gives each template the conversation in a form that it accepts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from troupellm.models.chat_template.message_forms import TURNS, TemplateTraits, repaired

Shown = Callable[[Sequence[Mapping[str, Any]]], str]
"""The text of a conversation; empty where the template refuses it."""

PROBE_TOOLS: Final = (
    {
        "type": "function",
        "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
)
"""Tools in the probes of a template that refuses chats without tools."""
_SHORT_ID = "abcdef123"
_LONG_ID = "call_0123456789abcdef"
_SYSTEM, _LATE, _ARGUMENT, _RESULT = "probe-system", "probe-late", "probe-argument", "probe-result"
_QUESTION, _ANSWER = "probe-question", "probe-answer"


def probed(shown: Shown) -> TemplateTraits:
    """The traits of a template. Those that no probe shows are the usual ones: a failed probe fails nothing."""
    traits = TemplateTraits()
    if f"{_QUESTION}-1" not in shown([_user(1)]):
        return traits
    traits = _with_system(shown, traits)
    if _RESULT in shown([_user(1), _calls(_SHORT_ID), _result(_SHORT_ID)]):
        traits = _with_calls(shown, traits)
    return _with_turns(shown, traits)


def _with_system(shown: Shown, traits: TemplateTraits) -> TemplateTraits:
    first = {"role": "system", "content": _SYSTEM}
    late = {"role": "system", "content": _LATE}
    text = shown([first, _user(1), _answer(1), late, _user(2)])
    # A template that shows it before the first answer would change the prefix of the conversation.
    anywhere = text.find(_LATE) > text.find(f"{_ANSWER}-1") >= 0
    return msgspec.structs.replace(
        traits, system_anywhere=anywhere, system_first=anywhere or bool(shown([first, _user(1)]))
    )


def _with_calls(shown: Shown, traits: TemplateTraits) -> TemplateTraits:
    second = f"{_SHORT_ID[:-1]}4"
    parallel = shown([_user(1), _calls(_SHORT_ID, second), _result(_SHORT_ID), _result(second)])
    text = shown([_user(1), _calls(_SHORT_ID, arguments=_ARGUMENT), _result(_SHORT_ID)])
    quoted = f'"{_ARGUMENT}"' in text or f"'{_ARGUMENT}'" in text
    return msgspec.structs.replace(
        traits,
        string_arguments=_ARGUMENT in text and not quoted,
        parallel_calls=bool(parallel),
        short_ids=not shown([_user(1), _calls(_LONG_ID), _result(_LONG_ID)]),
    )


def _with_turns(shown: Shown, traits: TemplateTraits) -> TemplateTraits:
    """The first form of turns in which the template shows a conversation of every irregularity."""
    first, second = _SHORT_ID, f"{_SHORT_ID[:-1]}4"
    messages = [
        *[_answer(1), _user(1), _user(2), _answer(2), _calls(first), _result(first), _user(3)],
        *[_calls(second), _user(4), _answer(3), _answer(4), _user(5)],
    ]
    wanted = [_RESULT, f"{_ANSWER}-4", *(f"{_QUESTION}-{number}" for number in range(1, 6))]
    for turns in TURNS:
        trial = msgspec.structs.replace(traits, turns=turns)
        text = shown(repaired(messages, trial))
        if all(mark in text for mark in wanted):
            return trial
    return traits


def _user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{_QUESTION}-{number}"}


def _answer(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"{_ANSWER}-{number}"}


def _calls(*ids: str, arguments: Any = None) -> dict[str, Any]:
    given = {"word": "x"} if arguments is None else arguments
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": given}} for name in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "name": "look", "content": _RESULT}
