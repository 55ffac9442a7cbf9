"""Reading a step's result: the checks, the stop rules, and what of it may be shown."""

import msgspec
import numpy as np

from troupellm.actors.scheduler.plans_in_flight import BrokenResult, PlanInFlight
from troupellm.actors.scheduler.speculative_rows import PLAIN
from troupellm.actors.sequences.sequence import Sequence
from troupellm.protocol.messages.output import RowFinished
from troupellm.protocol.messages.reply_fits import fits
from troupellm.protocol.messages.worker import RowError, RowLogprobs, StepResult


class Aligned(msgspec.Struct, frozen=True):
    """A result's columns for its plan's rows, in the plan's order."""

    token_counts: tuple[int, ...]
    tokens: tuple[int, ...]
    errors: dict[int, RowError]
    """By index in the plan."""
    finished: frozenset[int] = frozenset()
    """Rows whose guide is complete."""
    accepted: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    """Per row; both are empty where nothing was drafted."""


def align(launched: PlanInFlight, result: StepResult) -> Aligned:
    """Read a result against its plan.

    Raises:
        BrokenResult: the columns do not fit each other or the plan.
    """
    if not fits(launched.rows, launched.epochs, result):
        raise BrokenResult(f"step {result.step}: columns of the result do not fit each other or the plan")
    errors: dict[int, RowError] = {}
    if result.errors:
        failed = {error.row: error for error in result.errors}
        errors = {index: failed[row] for index, row in enumerate(launched.rows) if row in failed}
    finished = frozenset(result.finished)
    if finished and not finished <= {one.row for one in launched.sequences if one.sampling.guide is not None}:
        raise BrokenResult(f"step {result.step}: a row is complete that has no guide")
    aligned = Aligned(result.token_counts, result.tokens, errors, finished, result.accepted, result.drafted)
    if result.drafted or result.accepted or (launched.limits and result.token_counts != launched.expected):
        _check_drafts(launched, aligned, result.step)
    return aligned


def _check_drafts(launched: PlanInFlight, aligned: Aligned, step: int) -> None:
    """
    Raises:
        BrokenResult: drafts or tokens that the plan left no room for.
    """
    size = len(launched.rows)
    nothing = (0,) * size
    accepted, drafted = aligned.accepted or nothing, aligned.drafted or nothing
    limits = launched.limits or (PLAIN,) * size
    if not len(accepted) == len(drafted) == size or len(aligned.accepted) != len(aligned.drafted):
        raise BrokenResult(f"step {step}: columns of drafts do not fit the plan")
    rows = zip(launched.sequences, limits, aligned.token_counts, accepted, drafted, strict=True)
    for index, (sequence, limit, count, taken, given) in enumerate(rows):
        if not 0 <= taken <= given <= max(limit, 0):
            raise BrokenResult(f"step {step}: a row has {taken} accepted of {given} drafts, with a limit of {limit}")
        if limit == PLAIN or count == 1 + taken or index in aligned.errors:
            continue
        if sequence.sampling.guide is None or not (count > taken or count == taken == 0):
            raise BrokenResult(f"step {step}: a row has {count} tokens with {taken} accepted drafts")


def check_logprobs(result: StepResult, vocab_width: int) -> None:
    """Check log-probabilities: their text depends on their sizes, and a beam goes on with their tokens.

    Raises:
        BrokenResult: their columns do not fit each other, or name tokens that there are not.
    """
    entries = (*result.logprobs, *result.prompt_logprobs)
    for entry in entries:
        width, size = entry.width, len(entry.ranks)
        whole = width > 0 and size % 4 == 0 and len(entry.token_ids) == len(entry.logprobs) == size * width
        if not whole or len(entry.other_ranks) not in (0, size * (width - 1)):
            raise BrokenResult(f"step {result.step}: columns of log-probabilities do not fit each other")
    ids = np.frombuffer(b"".join([entry.token_ids for entry in entries]), dtype="<u4")  # below zero is beyond 2 ** 31
    if ids.size and int(ids.max()) >= vocab_width:
        raise BrokenResult(f"step {result.step}: log-probabilities of a token id outside 0..{vocab_width - 1}")


def accept(sequence: Sequence, tokens: tuple[int, ...], *, complete: bool = False) -> tuple[int, RowFinished | None]:
    """Append tokens up to the one that ends the sequence; how many were kept, and the end if there is one.

    A stop or end token counts from `min_tokens` generated tokens on, and so does a repetition; on the last allowed
    position they win over the limit, and so does a guide that is complete.

    Args:
        complete: nothing can follow the last of the tokens, says the sequence's guide.
    """
    known = sequence.tokens
    for index, token in enumerate(tokens):
        known.append(token)
        if token in sequence.stop_or_eos and sequence.num_generated >= sequence.min_tokens:
            is_eos = token in sequence.eos_token_ids
            return index + 1, RowFinished(sequence.row, "stop", None if is_eos else token, True)
        if complete and index + 1 == len(tokens):
            return index + 1, RowFinished(sequence.row, "stop")
        watch = sequence.repetition
        repeats = watch is not None and watch.follow(known, sequence.num_prompt_tokens)
        if repeats and sequence.num_generated >= sequence.min_tokens:
            return index + 1, RowFinished(sequence.row, "repetition")
        if len(known) >= sequence.limit:
            return index + 1, RowFinished(sequence.row, "length")
    return len(tokens), None


def trim_logprobs(entry: RowLogprobs, first: int, last: int) -> RowLogprobs | None:
    """The part of `entry` that describes positions first .. last - 1; None when there is none."""
    begin = max(first - entry.position, 0)
    end = min(last - entry.position, len(entry.ranks) // 4)
    if begin >= end:
        return None
    if begin == 0 and end == len(entry.ranks) // 4:
        return entry
    stride = 4 * entry.width
    return RowLogprobs(
        row=entry.row,
        position=entry.position + begin,
        width=entry.width,
        token_ids=entry.token_ids[begin * stride : end * stride],
        logprobs=entry.logprobs[begin * stride : end * stride],
        ranks=entry.ranks[4 * begin : 4 * end],
        other_ranks=entry.other_ranks[begin * (stride - 4) : end * (stride - 4)],
    )
