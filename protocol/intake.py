"""What the input processor is told."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from troupellm.protocol.output import Outbox
from troupellm.protocol.sampling import SamplingParams


class Party(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one call, which are let in together or not at all. All of them name the same party."""

    name: str
    """Unlike that of any other call."""
    sequences: int
    tokens: int
    """Prompt tokens, roughly."""
    max_tokens: int = 0
    """What all of them together may generate, as far as they say so."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for."""

    sequences: int
    tokens: int
    """Of its prompt, roughly."""
    max_tokens: int = 0
    """What it may generate in all its sequences, as far as it says so: counts towards a tenant's tokens per minute."""
    tenant: str = ""
    party: Party | None = None


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
