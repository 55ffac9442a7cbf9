"""Settings of structured outputs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from troupellm.protocol.config.setting_types import PositiveInt, help_text as _help


class GuideConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Structured outputs: who compiles grammars, and what one may cost."""

    guide_backend: Annotated[
        Literal["auto", "guidance", "llguidance", "xgrammar"],
        _help("grammar backend of requests that name none; auto and guidance: llguidance"),
    ] = "auto"
    guide_backends: Annotated[
        tuple[Literal["guidance", "llguidance", "xgrammar"], ...],
        _help("grammar backend that requests may name beside guide_backend, repeatable (default: all)"),
    ] = ("llguidance", "xgrammar")
    guide_timeout: Annotated[
        float,
        Meta(
            gt=0.0,
            le=60.0,
            description="processor seconds a grammar may take to compile, then it is refused; a busy machine has up to "
            "10 s more to give them, or as long again where that is more",
        ),
    ] = 1.0
    guide_memory_bytes: Annotated[PositiveInt, _help("memory a grammar may take in the process that compiles it")] = (
        512 * 2**20
    )
    guide_cache_bytes: Annotated[PositiveInt, _help("compiled grammars that are kept, in bytes")] = 64 * 2**20
    guide_depth: Annotated[PositiveInt, _help("levels of nesting in a JSON schema or structural tag")] = 64
    guide_fast_forward: Annotated[bool, _help("take tokens that a grammar forces without drawing them")] = True
    guide_any_whitespace: Annotated[
        bool, _help("JSON may hold any white space between its tokens, unless a request says otherwise")
    ] = True
    guide_additional_properties: Annotated[
        bool, _help("objects whose schema does not say may have other properties, unless a request says otherwise")
    ] = True
