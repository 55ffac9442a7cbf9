"""The limits of one tenant of the engine."""

from typing import Annotated

import msgspec
from msgspec import Meta

from troupellm.protocol.config.setting_types import PositiveInt


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one tenant (one API key), for this tenant alone; None is no limit."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^(?!.*\n)[A-Za-z0-9._-]+$")]
    """Shows in logs and metrics."""
    weight: Annotated[float, Meta(gt=0.0, le=1000.0)] = 1.0
    """Its part of the whole under the fair policy, relative to the others."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Under the priority policy: lower runs earlier, before the priority that a request asks for counts."""
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    """Prompt and generated tokens together."""
    models: tuple[Annotated[str, Meta(min_length=1, max_length=128)], ...] = ()
    """Names of models and adapters that its requests over HTTP may use, `*` for any letters; empty: all. Others are not
    found."""
    max_concurrency: PositiveInt | None = None
    """Sequences inside the engine at once: a request with n answers counts n times."""
