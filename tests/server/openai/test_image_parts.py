"""Images in the bodies of chat completions and messages, for models that see them and for others."""

import base64

import pytest

from troupellm.protocol.api.anthropic import InputMessage
from troupellm.protocol.api.chat import ChatMessage
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.media import MediaSource
from troupellm.server.messages.blocks import conversation_of
from troupellm.server.messages.images import SEE_BELOW
from troupellm.server.openai.past_messages import omitted, plain_messages

DATA = base64.b64encode(b"picture").decode()
URL = f"data:image/png;base64,{DATA}"


def part(url: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def chat(*contents: object, role: str = "user", **options: object) -> object:
    return plain_messages([ChatMessage(role=role, content=content) for content in contents], **options)


def test_an_image_keeps_its_place_among_the_texts():
    found = chat([{"type": "text", "text": "a"}, part(URL), part("https://host.example/b.png")], no_images=None)
    assert [one["type"] for one in found.messages[0]["content"]] == ["text", "image", "image"]
    assert found.media == (
        MediaSource(data=b"picture", field="messages[0].content[1]"),
        MediaSource(url="https://host.example/b.png", field="messages[0].content[2]"),
    )


BAD_URLS = (
    None, "", 5, "data:image/png;base64,***", "data:image/png;base64,", "data:text/plain;base64,AAAA", "data:,x",
)  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_part_without_a_sound_url_is_refused_by_its_place(url):
    with pytest.raises(InvalidRequest) as caught:
        chat([{"type": "text", "text": "a"}, part(url)], no_images=None)
    assert caught.value.param == "messages[0].content[1]"


def test_a_model_of_text_refuses_a_new_image_by_its_name_and_leaves_an_old_one_out():
    with pytest.raises(InvalidRequest, match="the model small reads text only"):
        chat([part(URL)], no_images="the model small reads text only")
    messages = [
        ChatMessage(role="user", content=[part(URL)]),
        ChatMessage(role="assistant", content="b"),
        ChatMessage(role="user", content="c"),
    ]
    old = plain_messages(messages, "the model small reads text only")
    assert (old.messages[0]["content"], old.media) == ([{"type": "text", "text": omitted("image")}], ())
    seen = plain_messages(messages, None)
    assert (seen.messages[0]["content"], len(seen.media)) == ([{"type": "image"}], 1)


def test_images_of_a_tools_result_stand_in_the_message_behind_it():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    call = {"type": "tool_use", "id": "one", "name": "shoot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "one", "content": [{"type": "text", "text": "done"}, image]}
    given = [
        InputMessage(role="user", content="go"),
        InputMessage(role="assistant", content=[call]),
        InputMessage(role="user", content=[result, {"type": "text", "text": "and?"}]),
    ]
    made = conversation_of(None, given, sees=True).messages
    assert made[2]["content"] == f"done\n\n{SEE_BELOW}"
    plain = plain_messages([ChatMessage(**message) for message in made], None)
    assert [one["type"] for one in plain.messages[3]["content"]] == ["image", "text"]
    assert plain.media == (MediaSource(data=b"picture", field="messages[2].content[0].content[1]"),)
    blind = conversation_of(None, given).messages
    assert blind[2]["content"].startswith("done")
    assert isinstance(blind[3]["content"], str)


@pytest.mark.parametrize("source", [None, {}, {"type": "base64"}, {"type": "file", "file_id": "x"}, {"type": "url"}])
def test_a_block_without_a_source_is_refused_by_its_place(source):
    with pytest.raises(InvalidRequest) as caught:
        conversation_of(None, [InputMessage(role="user", content=[{"type": "image", "source": source}])], sees=True)
    assert caught.value.param == "messages[0].content[0].source"


def test_an_old_block_without_a_source_is_left_out():
    given = [
        InputMessage(role="user", content=[{"type": "image", "source": {"type": "file", "file_id": "x"}}]),
        InputMessage(role="assistant", content="b"),
        InputMessage(role="user", content="c"),
    ]
    made = conversation_of(None, given, sees=True)
    assert made.messages[0]["content"] == omitted("image")
    assert made.skipped


def test_texts_beside_an_image_are_apart_as_without_one():
    image = {"type": "image", "source": {"type": "url", "url": "https://host.example/b.png"}}
    texts = [{"type": "text", "text": text} for text in "ab"]
    made = conversation_of(None, [InputMessage(role="user", content=[*texts, image])], sees=True)
    assert made.messages[0]["content"][0] == {"type": "text", "text": "a\n\nb"}
    assert len(made.messages[0]["content"]) == 2


def test_an_image_at_the_beginning_of_the_system_message_stays():
    given = [ChatMessage(role="system", content=[part(URL)]), ChatMessage(role="user", content="a")]
    made = plain_messages(given, None)
    assert (made.messages[0]["content"], len(made.media)) == ([{"type": "image"}], 1)
