"""Where in a text of harmony's messages a call is open."""

import pytest

from troupellm.models.chat_parsers.forced_calls import calls_or
from troupellm.models.chat_parsers.syntax import Channels, ChatSyntax
from troupellm.models.structured_outputs.open_calls import BEGINNING, OpenCalls
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.tools import NO_TOOLS

CHANNELS = Channels()
EARLY = calls_or(ChatSyntax(channels=CHANNELS), NO_TOOLS, GuideSpec(kind="json_object")).early_end
THOUGHT = "<|channel|>analysis<|message|>I call to=functions.now.<|end|>"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


def is_open(text: str, cut: int) -> bool:
    """In a text that comes in pieces of `cut` bytes."""
    assert EARLY is not None
    calls, place, data = OpenCalls(EARLY), BEGINNING, text.encode()
    for start in range(0, len(data), cut):
        place = calls.after(place, data[start : start + cut])
    return place.part == "call"


@pytest.mark.parametrize("cut", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", False),
        ("Just text.", False),
        ("<|channel|>analysis", False),
        ("<|channel|>analysis<|message|>I think", False),
        ("<|channel|>analysis<|message|>I call to=functions.now<|message|>{}", False),
        (THOUGHT, False),
        (f"{THOUGHT} to=functions.now<|message|>", False),
        (f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I will look.", False),
        (f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json", False),
        (f"{THOUGHT}<|start|>assistant{CALL}", True),
        (CALL, True),
        (" to=functions.now<|channel|>commentary json<|message|>{", True),
        (f"{THOUGHT}<|start|>assistant to=functions.now<|channel|>commentary<|message|>", True),
        ("<|channel|>commentary to=python<|message|>print()", False),
        (f"{CALL} and ünmarked <| text of any kind", True),
        (f"{CALL}<|end|>", False),
        (f"{CALL}<|call|>", False),
        (f"{CALL}<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.", False),
        (f"{CALL}<|channel|>analysis<|message|>Hm.", False),
        (f"<|channel|>commentary{' ' * 2000}to=functions.now<|message|>", False),
    ],
)
def test_a_call_is_a_message_whose_header_names_a_function(text: str, wanted: bool, cut: int) -> None:
    assert is_open(text, cut) is wanted


def test_what_is_remembered_of_a_text_stays_small() -> None:
    assert EARLY is not None
    calls, place = OpenCalls(EARLY), BEGINNING
    for _ in range(1000):
        place = calls.after(place, b"word " * 10)
    assert len(place.header) + len(place.rest) < 2000
