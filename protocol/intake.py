"""What the input processor is told."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.output import Outbox
from troupellm.protocol.sampling import SamplingParams


class TextPrompt(msgspec.Struct, frozen=True):
    text: str
    add_special_tokens: bool = True


class TokensPrompt(msgspec.Struct, frozen=True):
    token_ids: Sequence[int]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages to be rendered by the model's chat template (`role`, `content` and what else the template reads)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] | None = None


Prompt = TextPrompt | TokensPrompt | ChatPrompt


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Render, tokenize, validate, then tell the output actor and the scheduler; a refusal goes to the outbox."""

    request: int
    request_id: str
    arrival: float
    prompt: Prompt
    params: SamplingParams
    outbox: Outbox
    streaming: bool = True
    tenant: str = ""
    cache_salt: bytes = b""
    deadline: float | None = None


IntakeMessage = PrepareRequest
