import msgspec
import pytest

from troupellm.protocol.api.chat import ChatMessage, ChatRequest, CompletionRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import TextPrompt, TokensPrompt
from troupellm.protocol.params.sampling import Limits, SamplingParams
from troupellm.server.openai.parameters import (
    chat_prompt,
    completion_prompts,
    refuse_unsupported,
    renames,
    sampling_params,
)
from troupellm.server.openai.past_messages import plain_messages

USER = ChatMessage(role="user", content="Hi")


class Defaults:
    """The part of an engine that parameters are resolved against."""

    limits = Limits(vocab_width=100, max_model_len=64)

    def __init__(self, **defaults: object) -> None:
        self.defaults = defaults

    def sampling(self, **overrides: object) -> SamplingParams:
        return SamplingParams(**(self.defaults | overrides))


def test_models_defaults_hold_until_the_request_says_otherwise():
    engine = Defaults(temperature=0.6, top_p=0.9)
    params = sampling_params(ChatRequest(messages=[USER], top_p=0.5), engine)
    assert (params.temperature, params.top_p) == (0.6, 0.5)


def test_chat_runs_to_the_context_and_completions_to_16_tokens():
    assert sampling_params(ChatRequest(messages=[USER]), Defaults()).max_tokens is None
    assert sampling_params(CompletionRequest(prompt="x"), Defaults()).max_tokens == 16
    assert sampling_params(ChatRequest(messages=[USER]), Defaults(max_tokens=40)).max_tokens == 40


def test_newer_name_of_max_tokens_wins_and_is_the_one_in_errors():
    request = ChatRequest(messages=[USER], max_tokens=5, max_completion_tokens=7)
    assert sampling_params(request, Defaults()).max_tokens == 7
    assert renames(request)["max_tokens"] == "max_completion_tokens"


def test_every_sampling_field_of_a_body_arrives():
    values = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["a"],
        "stop_token_ids": [1],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "max_tokens": 9,
        "min_tokens": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {1: 2.0},
        "allowed_token_ids": [1, 2],
        "bad_words": ["b"],
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
        "priority": 4,
        "logprobs": 3,
    }
    params = sampling_params(CompletionRequest(prompt="x", **values), Defaults())
    assert {name: getattr(params, name) for name in values} == values


def test_no_logprobs_with_zero_alternatives_is_no_contradiction():
    for given in (False, None):
        request = ChatRequest(messages=[USER], logprobs=given, top_logprobs=0)
        assert sampling_params(request, Defaults()).logprobs is None


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"store": True}, "store"),
        ("chat", {"chat_template": "x"}, "chat_template"),
        ("chat", {"web_search_options": {"a": 1}}, "web_search_options"),
        ("text", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"modalities": "audio"}, "modalities"),
        ("text", {"suffix": "end"}, "suffix"),
        ("chat", {"truncate_prompt_tokens": None, "echo": False, "modalities": ["text"]}, None),
        ("chat", {"modalities": [], "length_penalty": 1, "use_beam_search": False, "documents": []}, None),
        ("chat", {"modalities": None, "length_penalty": None, "echo": None, "documents": None}, None),
        ("text", {"suffix": "", "echo": True, "length_penalty": 1.0}, None),
        ("text", {"suffix": None, "use_beam_search": None, "guided_json": {}}, None),
    ],
)
def test_fields_that_would_change_the_answer_are_refused_by_name(kind, fields, param):
    given = {"messages": [{"role": "user", "content": "Hi"}]} if kind == "chat" else {"prompt": "Hi"}
    request = msgspec.convert(given | fields, ChatRequest if kind == "chat" else CompletionRequest)
    if param is None:
        refuse_unsupported(request)
        return
    with pytest.raises(InvalidRequest) as caught:
        refuse_unsupported(request)
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatRequest, {"n": 2, "best_of": 3}, "best_of"),
        (CompletionRequest, {"n": 3, "best_of": 2}, "best_of"),
        (CompletionRequest, {"n": 2, "best_of": 3, "stream": True}, "best_of"),
        (CompletionRequest, {"use_beam_search": True, "stream": True}, "use_beam_search"),
        (ChatRequest, {"use_beam_search": True, "stream": True}, "use_beam_search"),
        (ChatRequest, {"use_beam_search": True, "temperature": 0.7}, "temperature"),
        (ChatRequest, {"use_beam_search": True, "top_p": 0.7}, "top_p"),
        (ChatRequest, {"use_beam_search": True, "stop": ["x"]}, "stop"),
        (CompletionRequest, {"use_beam_search": True, "logit_bias": {1: 1.0}}, "logit_bias"),
        (CompletionRequest, {"length_penalty": 0.8}, "length_penalty"),
        (CompletionRequest, {"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        (ChatRequest, {"early_stopping": True}, "early_stopping"),
    ],
)
def test_choices_that_cannot_be_made_are_refused_by_name(kind, fields, param):
    given = {"messages": [USER]} if kind is ChatRequest else {"prompt": "x"}
    with pytest.raises(InvalidRequest) as caught:
        sampling_params(kind(**given, **fields), Defaults(temperature=0.0))
    assert caught.value.param == param


def test_best_of_and_beams_reach_the_engine():
    best = sampling_params(CompletionRequest(prompt="x", n=2, best_of=3), Defaults())
    assert (best.n, best.num_sequences, best.selects) == (2, 3, "best_of")
    request = ChatRequest(messages=[USER], n=4, use_beam_search=True, length_penalty=0.5, early_stopping=True)
    beams = sampling_params(request, Defaults(temperature=0.0))
    assert (beams.num_sequences, beams.length_penalty, beams.early_stopping) == (4, 0.5, True)


@pytest.mark.parametrize(
    "fields", [{"stream_options": None}, {"stream": True, "stream_options": {}}, {"stream": None, "max_tokens": None}]
)
def test_null_is_the_default_of_every_optional_field(fields):
    for kind, given in ((ChatRequest, {"messages": []}), (CompletionRequest, {"prompt": "x"})):
        absent = {field.name: None for field in msgspec.structs.fields(kind) if field.default is None}
        request = msgspec.convert(absent | given | fields, kind)
        refuse_unsupported(request)
        assert sampling_params(request, Defaults()).n == 1
    options = {"include_usage": None, "continuous_usage_stats": None}
    assert msgspec.convert({"prompt": "x", "stream": True, "stream_options": options}, CompletionRequest)


def test_prompts_of_every_form():
    assert completion_prompts(CompletionRequest(prompt="x", add_special_tokens=False), 4) == [TextPrompt("x", False)]
    assert completion_prompts(CompletionRequest(prompt=[1, 2]), 1) == [TokensPrompt([1, 2])]
    assert completion_prompts(CompletionRequest(prompt=["a", "b"]), 2) == [TextPrompt("a"), TextPrompt("b")]
    assert completion_prompts(CompletionRequest(prompt=[[1], [2]]), 2) == [TokensPrompt([1]), TokensPrompt([2])]


def test_a_result_without_a_call_is_a_text_of_the_user():
    call = {"id": "c1", "type": "function", "function": {"name": "f"}}
    answer = ChatMessage(role="assistant", tool_calls=[call])
    result = ChatMessage(role="tool", content="5", tool_call_id="c1")
    called = plain_messages([USER, answer, result])
    assert [message["role"] for message in called.messages] == ["user", "assistant", "tool"]
    assert called.messages[2]["tool_call_id"] == "c1"
    assert not called.skipped
    uncalled = plain_messages([USER, result])
    assert uncalled.messages[1] == {"role": "user", "content": "Result of an earlier call: 5"}
    assert uncalled.skipped == ["result without_call"]


def test_going_on_with_the_last_message():
    started = ChatMessage(role="assistant", content="So")
    request = ChatRequest(messages=[], continue_final_message=True)
    prompt = chat_prompt(request, plain_messages([USER, started]).messages)
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
