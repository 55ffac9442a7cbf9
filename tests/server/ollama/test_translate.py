"""Ollama's requests as chat requests and completions."""

import msgspec
import pytest

from troupellm.protocol.api.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.ollama.translate import (
    chat_of,
    chat_of_prompt,
    completion_of,
    plain_name,
    skipped_options,
    tagged,
)

USER = {"role": "user", "content": "Hi"}


def chat(*, switches=("enable_thinking",), thinks=True, **fields):
    body = msgspec.convert({"messages": [USER]} | fields, OllamaChatRequest)
    return chat_of(body, "m", switches=switches, thinks=thinks)


def prompt(**fields) -> OllamaGenerateRequest:
    return msgspec.convert({"prompt": "Hi"} | fields, OllamaGenerateRequest)


def test_options_have_their_names_in_the_chat_api():
    options = {
        "num_predict": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ["x"],
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "num_ctx": 64, "num_gpu": 1,
    }  # fmt: skip
    made = chat(options=options)
    assert (made.max_completion_tokens, made.temperature, made.top_k, made.top_p, made.min_p) == (5, 0.5, 3, 0.9, 0.1)
    assert (made.seed, made.stop, made.repetition_penalty) == (7, ["x"], 1.1)
    assert (made.presence_penalty, made.frequency_penalty, made.model) == (0.2, 0.3, "m")


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_a_limit_below_one_is_none(limit):
    assert chat(options={"num_predict": limit, "seed": -1}).max_completion_tokens is None
    assert chat(options={"seed": -1}).seed is None


@pytest.mark.parametrize(
    ("wanted", "fields"),
    [
        (None, (None, None, None)),
        (True, (True, {"enable_thinking": True}, None)),
        (False, (False, {"enable_thinking": False}, None)),
        ("low", (None, None, "low")),
    ],
)
def test_think_sets_the_switches_of_the_template(wanted, fields):
    made = chat(think=wanted)
    assert (made.include_reasoning, made.chat_template_kwargs, made.reasoning_effort) == fields


def test_a_model_that_does_not_think_can_only_be_asked_not_to():
    with pytest.raises(InvalidRequest, match="does not support thinking"):
        chat(think=True, thinks=False)
    assert chat(think=False, thinks=False, switches=()).chat_template_kwargs is None


def test_format_is_json_or_a_schema():
    assert chat(format="json").response_format == {"type": "json_object"}
    assert chat(format="").response_format is None
    schema = {"type": "object"}
    assert chat(format=schema).response_format["json_schema"]["schema"] == schema
    with pytest.raises(InvalidRequest, match="format must be"):
        chat(format="xml")


def test_results_answer_the_call_of_their_name_or_the_first_open_one():
    def call(name):
        return {"function": {"name": name, "arguments": {"a": 1}}}

    made = chat(
        messages=[
            USER,
            {"role": "assistant", "tool_calls": [call("f"), call("g"), call("h")]},
            {"role": "tool", "content": "G", "tool_name": "g"},
            {"role": "tool", "content": "F"},
            {"role": "tool", "content": "H", "tool_call_id": "own"},
        ]
    ).messages
    assert [entry["id"] for entry in made[1].tool_calls] == ["call_1_0", "call_1_1", "call_1_2"]
    assert [message.tool_call_id for message in made[2:]] == ["call_1_1", "call_1_0", "own"]


def test_images_are_parts_behind_the_text():
    made = chat(messages=[USER | {"images": ["/9j/AA", "iVBORw0"]}]).messages[0].content
    assert [part["type"] for part in made] == ["text", "image_url", "image_url"]
    assert made[1]["image_url"]["url"] == "data:image/jpeg;base64,/9j/AA"
    assert made[2]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_prompt_is_a_conversation_with_its_system_text():
    made = chat_of_prompt(prompt(system="Be brief."), "m", switches=(), thinks=False)
    assert [(message.role, message.content) for message in made.messages] == [("system", "Be brief."), ("user", "Hi")]


def test_a_raw_prompt_is_a_completion():
    made = completion_of(prompt(raw=True, options={"num_predict": 3}, logprobs=True, top_logprobs=2), "m")
    assert (made.prompt, made.max_tokens, made.logprobs) == ("Hi", 3, 2)
    with pytest.raises(InvalidRequest, match="system needs a prompt that is not raw"):
        completion_of(prompt(raw=True, system="x"), "m")


def test_options_without_an_effect_on_sampling_are_named():
    options = msgspec.convert({"mirostat": 1, "repeat_last_n": 64, "tfs_z": 0}, OllamaOptions)
    assert skipped_options(options) == ["option mirostat", "option repeat_last_n"]
    assert skipped_options(None) == []


def test_the_tag_latest_means_the_model_without_one():
    assert plain_name("tiny:latest", ["tiny"]) == "tiny"
    assert plain_name("tiny:latest", ["tiny:latest"]) == "tiny:latest"
    assert plain_name("tiny:7b", ["tiny"]) == "tiny:7b"
    assert [tagged("tiny"), tagged("tiny:7b")] == ["tiny:latest", "tiny:7b"]
