"""The resources that a request asks for, estimated before its prompt is tokenized."""

from collections.abc import Mapping, Sequence

from troupellm.actors.admission.submission import Submission
from troupellm.protocol.messages.input import (
    ChatPrompt,
    Demand,
    EmbedsPrompt,
    PairPrompt,
    Prompt,
    RequestGroup,
    TextPrompt,
    TokensPrompt,
)
from troupellm.protocol.params.sampling import SamplingParams

CHARACTERS_PER_TOKEN = 4


def estimate_tokens(prompt: Prompt) -> int:
    """Prompt tokens, roughly, without touching the tokenizer."""
    match prompt:
        case TokensPrompt(token_ids=token_ids):
            return len(token_ids)
        case EmbedsPrompt(num_tokens=num_tokens):
            return num_tokens
        case TextPrompt(text=text):
            return len(text) // CHARACTERS_PER_TOKEN + 1
        case PairPrompt(text=text, second=second):
            return (len(text) + len(second)) // CHARACTERS_PER_TOKEN + 2
        case ChatPrompt(messages=messages):
            letters = sum(_letters(message) for message in messages)
            return letters // CHARACTERS_PER_TOKEN + 4 * len(messages) + 1


def _letters(value: object) -> int:
    """Characters of text in a message or a part of one; what has another shape is refused later, by its reader."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_letters(value.get(field)) for field in ("content", "text"))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return sum(_letters(part) for part in value if isinstance(part, Mapping))
    return 0


def demand_of(submission: Submission) -> Demand:
    """Estimate the resources that a request asks for, before its prompt is tokenized."""
    params = submission.params
    return Demand(
        sequences=params.num_sequences,
        tokens=estimate_tokens(submission.prompt),
        max_tokens=0 if submission.pooling else params.num_sequences * (params.max_tokens or 0),
        tenant=submission.tenant,
        request_group=submission.request_group,
        many_prompts=submission.many_prompts,
    )


def request_group_of(name: str, prompts: Sequence[Prompt], params: SamplingParams) -> RequestGroup | None:
    """One call's prompts as a group, which is let in as a whole; None for a lone prompt.

    Args:
        name: unlike that of any other call.
    """
    if len(prompts) < 2:
        return None
    sequences = len(prompts) * params.num_sequences
    return RequestGroup(
        name=name,
        sequences=sequences,
        tokens=sum(estimate_tokens(prompt) for prompt in prompts),
        max_tokens=sequences * (params.max_tokens or 0),
    )
