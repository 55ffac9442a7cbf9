"""Settings of request bodies."""

from typing import Annotated

import msgspec

from troupellm.protocol.config.setting_types import PositiveInt, Seconds, help_text as _help


class BodyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How large request bodies may be, alone and together, and how slow."""

    max_body_bytes: Annotated[PositiveInt, _help("largest request body")] = 8 * 2**20
    max_bodies_bytes: Annotated[
        PositiveInt,
        _help(
            "bytes of all request bodies that one HTTP process works on, with their decoded lists; one more waits, and "
            "is refused in the end"
        ),
    ] = 64 * 2**20
    body_timeout: Annotated[
        Seconds, _help("seconds a client may take to send its body, and seconds its body waits for room; 0 is off")
    ] = 30.0
