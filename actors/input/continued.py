"""The sequences of a request that another engine began: those that go on, with the tokens that they have."""

from collections.abc import Sequence

from msgspec.structs import replace

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import Generated
from troupellm.protocol.messages.scheduler import SequenceSpec
from troupellm.protocol.params.sampling import SamplingParams


def continued(
    sequences: tuple[SequenceSpec, ...],
    generated: Sequence[Generated],
    params: SamplingParams,
    max_tokens: int,
    vocab_width: int,
) -> tuple[SequenceSpec, ...]:
    """The sequences that have not ended. Log-probabilities of the prompt are not told again.

    Args:
        sequences: all of the request.
        generated: empty, or one for each of them.
        max_tokens: of each sequence.

    Raises:
        InvalidRequest: no such sequence can go on.
    """
    if not generated:
        return sequences
    if params.use_beam_search:
        raise _invalid("must be empty with use_beam_search: a search starts over")
    if len(generated) != len(sequences):
        raise _invalid(f"must have one entry for each of the {len(sequences)} sequences, got {len(generated)}")
    going = tuple(
        replace(spec, generated=known.token_ids, sampling=replace(spec.sampling, prompt_logprobs=-1))
        for spec, known in zip(sequences, generated, strict=True)
        if not known.ended
    )
    if not going:
        raise _invalid("must have a sequence that has not ended")
    for spec in going:
        _check(spec.generated, max_tokens, vocab_width)
    return going


def _check(token_ids: bytes, max_tokens: int, vocab_width: int) -> None:
    if len(token_ids) % 4:
        raise _invalid(f"must hold int32 token ids, got {len(token_ids)} bytes")
    ids = memoryview(token_ids).cast("i")
    if len(ids) >= max_tokens:
        raise _invalid(f"has {len(ids)} tokens of a sequence, which max_tokens ({max_tokens}) leaves no room behind")
    wrong = next((token_id for token_id in ids if not 0 <= token_id < vocab_width), None)
    if wrong is not None:
        raise _invalid(f"has token id {wrong}; ids must be in [0, {vocab_width - 1}]")


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"generated {problem}", param="generated")
