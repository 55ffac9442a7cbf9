"""Images in the messages of `Engine.chat`."""

import pytest
from PIL import Image

from troupellm.actors.client.images import taken_images
from troupellm.protocol.errors import InvalidRequest


def test_an_image_that_cannot_be_written_is_the_callers_fault():
    part = {"type": "image", "image": Image.new("CMYK", (4, 4))}
    with pytest.raises(InvalidRequest, match="cannot be read") as caught:
        taken_images([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0]"
