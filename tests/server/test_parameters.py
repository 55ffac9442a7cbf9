import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.intake import TextPrompt, TokensPrompt
from troupellm.protocol.openai import ChatMessage, ChatRequest, CompletionRequest
from troupellm.protocol.sampling import Limits, SamplingParams
from troupellm.server.parameters import chat_prompt, completion_prompts, renames, sampling_params

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


def test_prompts_of_every_form():
    assert completion_prompts(CompletionRequest(prompt="x", add_special_tokens=False), 4) == [TextPrompt("x", False)]
    assert completion_prompts(CompletionRequest(prompt=[1, 2]), 1) == [TokensPrompt([1, 2])]
    assert completion_prompts(CompletionRequest(prompt=["a", "b"]), 2) == [TextPrompt("a"), TextPrompt("b")]
    assert completion_prompts(CompletionRequest(prompt=[[1], [2]]), 2) == [TokensPrompt([1]), TokensPrompt([2])]


def test_tool_results_need_a_call_before_them():
    call = ChatMessage(role="assistant", tool_calls=[{"id": "c1", "type": "function", "function": {"name": "f"}}])
    result = ChatMessage(role="tool", content="5", tool_call_id="c1")
    prompt = chat_prompt(ChatRequest(messages=[]), [USER, call, result])
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.messages[2]["tool_call_id"] == "c1"
    with pytest.raises(InvalidRequest) as caught:
        chat_prompt(ChatRequest(messages=[]), [USER, result])
    assert caught.value.param == "messages[1]"


def test_going_on_with_the_last_message():
    started = ChatMessage(role="assistant", content="So")
    request = ChatRequest(messages=[], continue_final_message=True)
    prompt = chat_prompt(request, [USER, started])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)
