"""Beam search: what it refuses, and vLLM's parameters and outputs for `LLM.beam_search`.

The search looks at the model's own log-probabilities, so nothing that changes how a token is drawn goes with it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.outputs import FinishReason

if TYPE_CHECKING:
    from troupellm.protocol.params.sampling import SamplingParams

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, [], ()),
    "stop": (None, [], ()),
    "stop_token_ids": (None, [], ()),
    "logprob_token_ids": (None,),
    "thinking_token_budget": (None, -1),
    "repetition_detection": (None,),
    "logits_processors": (None, {}),
    "extra_args": (None, {}),
}
_ONLY_BEAMS = {"length_penalty": 1.0, "early_stopping": False}


def check_beam_fields(params: "SamplingParams") -> None:
    """Fields that have no meaning with or without a beam search.

    Raises:
        InvalidRequest: names the field and what it must be.
    """
    if not params.use_beam_search:
        for field, value in _ONLY_BEAMS.items():
            if getattr(params, field) != value:
                raise InvalidRequest(
                    f"{field} must be {str(value).lower()} without use_beam_search: it has no effect", param=field
                )
        return
    for field, allowed in _NEUTRAL.items():
        if getattr(params, field) not in allowed:
            wanted = "absent" if allowed[0] is None else f"{allowed[0]:g}"
            raise InvalidRequest(f"{field} must be {wanted} with use_beam_search", param=field)


def beam_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A model's own sampling defaults, less those that do not go with a beam search."""
    return {name: value for name, value in defaults.items() if name not in _NEUTRAL} | {"temperature": 0.0}


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How `LLM.beam_search` searches, with vLLM's names.

    A candidate's score is its cumulative log-probability / length ** length_penalty; the length counts the prompt.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


class BeamSearchSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    tokens: list[int]
    """Prompt and answer, the token that ended it included."""
    logprobs: list[dict[int, Any]]
    """Per token of the answer: the likeliest tokens where it was chosen."""
    cum_logprob: float
    text: str
    """Of prompt and answer."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class BeamSearchOutput(msgspec.Struct, frozen=True):
    sequences: list[BeamSearchSequence]
    """Best first."""
