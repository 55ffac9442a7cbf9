"""Checkpoints that see images, by their files alone."""

import json

import pytest

from troupellm.models.media.description import describe_media
from troupellm.protocol.config.media import MediaConfig


@pytest.mark.parametrize(
    ("tower", "sees"), [("clip_vision_model", True), ("siglip_vision_model", True), ("pixtral", False)]
)
def test_a_checkpoint_with_an_encoder_that_is_not_served_has_its_text_part_served(tower, sees, tmp_path):
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 7,
        "vision_config": {"model_type": tower, "patch_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert (describe_media(tmp_path, MediaConfig()) is not None) is sees
