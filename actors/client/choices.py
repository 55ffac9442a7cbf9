"""From the pieces of all sequences to the choices of an answer."""

from collections.abc import Mapping, Sequence

import msgspec

from troupellm.protocol.params.outputs import CompletionChoice, Delta
from troupellm.protocol.params.sampling import SamplingParams


def gather_choices(
    pieces: Mapping[int, Sequence[Delta]], params: SamplingParams | None = None
) -> tuple[CompletionChoice, ...]:
    """The choices of a request that has ended.

    Args:
        pieces: deltas by sequence.
        params: of the request; None shows every sequence.
    """
    choices = [_choice(index, pieces[index]) for index in sorted(pieces)]
    if params is None or params.selects is None:
        return tuple(choices)
    if not params.use_beam_search:  # whose sequences come in order
        choices.sort(key=lambda choice: -(choice.cumulative_logprob or 0.0))
    shown = choices[: params.n]
    hidden = params.logprobs is None
    return tuple(
        msgspec.structs.replace(choice, index=index, logprobs=None if hidden else choice.logprobs)
        for index, choice in enumerate(shown)
    )


def _choice(index: int, deltas: Sequence[Delta]) -> CompletionChoice:
    with_logprobs = any(delta.logprobs is not None for delta in deltas)
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return CompletionChoice(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        logprobs=logprobs if with_logprobs else None,
        cumulative_logprob=sum(entry.logprob for entry in logprobs) if with_logprobs else None,
    )
