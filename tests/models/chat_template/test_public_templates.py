"""Shapes of public chat templates: long conversations render within the limits, in every form that clients send."""

import time
from pathlib import Path

import pytest

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import TemplateProcesses

FOLDER = Path(__file__).parents[1] / "chat_templates"
SHAPES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
CONTEXT = 131_072
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a word.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "most": {"type": "integer"}}},
        },
    }
]
WITHOUT_TOOLS = {"gemma_3"}
"""Families whose template shows no calls."""


@pytest.fixture(scope="module")
def processes():
    made = TemplateProcesses()
    yield made
    made.close()


@pytest.fixture(scope="module", params=SHAPES)
def shape(request, processes):
    loaded = ChatTemplate({"default": (FOLDER / f"{request.param}.jinja").read_text("utf-8")}, TOKENS, processes)
    loaded.fit(CONTEXT)
    return request.param, loaded


def rounds(number, arguments=None):
    """A question, and calls with their results before the answer."""
    messages = [{"role": "user", "content": "Which words are there?"}]
    for index in range(number):
        given = {"word": f"word {index}", "most": index} if arguments is None else arguments
        call = {"id": f"call{index:05}", "type": "function", "function": {"name": "look_up", "arguments": given}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = f"result {index} of many, with a few more words"
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": result})
    return messages


def test_there_are_ten_shapes_at_least():
    assert len(SHAPES) >= 10


def test_a_thousand_tool_rounds_render_within_a_second_of_processor_time(shape, processes):
    name, loaded = shape
    began = sum(time.clock_gettime(~pid << 3 | 2) for pid in processes.pids)
    text = loaded.patient.render(rounds(1_000), TOOLS)
    assert sum(time.clock_gettime(~pid << 3 | 2) for pid in processes.pids) - began < 1.0
    assert all(f"result {index} of" in text for index in range(1_000))
    assert name in WITHOUT_TOOLS or "word 999" in text


@pytest.mark.parametrize("arguments", [{"word": "a", "most": 1}, {}, "no object"], ids=["object", "empty", "text"])
def test_arguments_of_every_form_are_shown(shape, arguments):
    name, loaded = shape
    text = loaded.render(rounds(1, arguments), TOOLS)
    if name not in WITHOUT_TOOLS and arguments:
        assert ("no object" if isinstance(arguments, str) else "most") in text.rpartition("result 0")[0]


def test_contents_of_parts_are_shown_as_texts_are(shape):
    _, loaded = shape
    parts = [{"role": "user", "content": [{"type": "text", "text": "one part"}]}]
    assert loaded.render(parts) == loaded.render([{"role": "user", "content": "one part"}])
