"""A stream of several completions, over an engine that is not there."""

from types import SimpleNamespace
from typing import Any

import pytest

from troupellm.protocol.api.chat import CompletionRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import TextPrompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.server.openai.completions import _stream

pytestmark = pytest.mark.anyio


class Prompted:
    """The stream of one prompt."""

    def __init__(self, told: list[str], text: str) -> None:
        self._told = told
        self._text = text

    async def opened(self) -> None:
        if self._text == "b":
            raise InvalidRequest("it cannot be served", param="prompt")

    def abort(self) -> None:
        self._told.append("abort")

    async def cancel(self) -> None:
        self._told.append("cancel")


async def test_all_prompts_of_a_call_end_at_once_and_not_one_step_after_the_other() -> None:
    told: list[str] = []

    def stream(prompt: TextPrompt, params: SamplingParams, **options: Any) -> Prompted:
        return Prompted(told, prompt.text)

    request = CompletionRequest(model="m", prompt=["a", "b", "c"], stream=True)
    writer: Any = SimpleNamespace(request=request, response_id="cmpl-1")
    engine: Any = SimpleNamespace(stream=stream)
    host: Any = None
    exchange: Any = SimpleNamespace(key="", adapter="", header=lambda name: None)
    prompts = [TextPrompt(text) for text in "abc"]
    with pytest.raises(ExceptionGroup):
        await _stream(host, exchange, engine, prompts, SamplingParams(), writer)
    assert told == ["abort"] * 3 + ["cancel"] * 3
