"""Settings of images: which may come, from where, and what they may cost."""

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from troupellm.protocol.config.setting_types import PositiveInt, help_text as _help
from troupellm.protocol.errors import ConfigError

ANY_DOMAIN: Final = "*"
MOST_MEDIA_BYTES: Final = 60 * 2**20
"""An encoded image goes to the process that decodes it in one frame of 64 MiB."""
_DOMAIN: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_KINDS: Final = ("image", "audio", "video")
"""As vLLM names them; numbers of the others change nothing, since none is taken."""


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Images in prompts, where the model sees them.

    Raises:
        ConfigError: (a ValueError) a value that is not understood; `param` names the setting.
    """

    language_model_only: Annotated[bool, _help("serve the text part alone, and read no encoder of images")] = False
    limit_mm_per_prompt: Annotated[dict[str, int], _help('most images of one prompt, as {"image": 4} (default: 8)')] = (
        msgspec.field(default_factory=dict)
    )
    allowed_media_domains: Annotated[
        tuple[str, ...],
        _help(
            "hosts that images may be fetched from, repeatable; *.name for those below it, * for any (default: none)"
        ),
    ] = ()
    media_timeout: Annotated[
        float, Meta(gt=0.0, description="seconds that fetching an image may take, and preparing it")
    ] = 10.0
    max_media_bytes: Annotated[
        int, Meta(ge=1, le=MOST_MEDIA_BYTES, description="largest encoded image, up to 60 MiB")
    ] = 20 * 2**20
    max_image_pixels: Annotated[PositiveInt, _help("most pixels of an image")] = 50_000_000
    media_memory_bytes: Annotated[PositiveInt, _help("most bytes of prepared images that requests hold at once")] = (
        2**30
    )
    mm_processor_cache_bytes: Annotated[int, Meta(ge=0, description="bytes of prepared images that are kept")] = (
        256 * 2**20
    )
    encoder_cache_bytes: Annotated[PositiveInt, _help("bytes of image embeddings that the worker keeps")] = 256 * 2**20
    max_num_encoder_tokens: Annotated[
        PositiveInt, _help("image embeddings that one step makes; a larger image has a step of its own")
    ] = 2048
    mm_processor_kwargs: Annotated[
        dict[str, Any], _help("settings of the model's image processor, over those of its files")
    ] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, number in self.limit_mm_per_prompt.items():
            if kind not in _KINDS or number < 0:
                text = 'limit_mm_per_prompt must be like {"image": 8}, with numbers from 0 on'
                raise ConfigError(text, param="limit_mm_per_prompt")
        for domain in self.allowed_media_domains:
            if domain != ANY_DOMAIN and _DOMAIN.fullmatch(domain.lower()) is None:
                text = f"allowed_media_domains: {domain[:64]!r} is no host; give name.example, *.name.example or *"
                raise ConfigError(text, param="allowed_media_domains")

    @property
    def most_images(self) -> int:
        """Of one prompt."""
        return self.limit_mm_per_prompt.get("image", 8)

    def allows(self, host: str) -> bool:
        """True if images may be fetched from a host."""
        host = host.lower().rstrip(".")
        for domain in map(str.lower, self.allowed_media_domains):
            if domain in (ANY_DOMAIN, host) or (domain.startswith("*.") and host.endswith(domain[1:])):
                return True
        return False
