"""Placeholders of images in prompts: those of the template count, and those of the caller are plain text."""

from types import SimpleNamespace

import pytest

from troupellm.actors.input.media_prompt import MediaPrompts, media_tokens
from troupellm.models.tokenizer.tokenizer import TooManyTokens
from troupellm.protocol.errors import ContextLengthExceeded
from troupellm.protocol.messages.input import ChatPrompt
from troupellm.protocol.messages.media import MediaItem

ITEM = MediaItem(digest=b"a" * 32, num_vectors=3, grid=(1, 1), tensors=())


def test_a_media_token_in_a_name_of_a_tools_argument_is_plain_text():
    prompts = MediaPrompts(SimpleNamespace(token_id=7), SimpleNamespace(added_tokens={"<image>": 7}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a<image>": {}, 1: {}}}}}
    broken = prompts.broken(ChatPrompt(messages=[], tools=[tool], items=(ITEM,)), "!")
    assert list(broken.tools[0]["function"]["parameters"]["properties"]) == ["a<!image>", 1]


def test_a_text_of_too_many_tokens_beside_an_image_is_refused_as_too_long():
    def tokenize(*_):
        raise TooManyTokens(600)

    prompt = ChatPrompt(messages=[{"role": "user", "content": "a"}], items=(ITEM,))
    with pytest.raises(ContextLengthExceeded) as caught:
        media_tokens(SimpleNamespace(tokenize=tokenize), prompt, None, 512)
    assert caught.value.param == "messages"
