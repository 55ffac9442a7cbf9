"""Beam search on sequences: hears of every beam's candidates, lets the sequences go on from each other, shows the end.

The sequences of a search advance together. When all of them have come back, each becomes the continuation of one of
them: it shares that one's blocks by reference and copies the last one before it writes there. Nothing is shown before
the search is over, because until then every beam may lose.
"""

from array import array

import msgspec

from troupellm.actors.kv_cache.block_tables import BlockTables
from troupellm.actors.scheduler.open_requests import OpenRequests
from troupellm.actors.scheduler.plans_in_flight import PlanInFlight
from troupellm.actors.scheduler.running_set import RunningSet
from troupellm.actors.sequences.beam_search import Answer, Step
from troupellm.actors.sequences.sequence import Event, LastToken, Request, Sequence
from troupellm.protocol.messages.output import RowFinished
from troupellm.protocol.messages.worker import RowFork, RowLogprobs, StepResult


class Shown(msgspec.Struct):
    """The answers of the searches that ended, one entry per answer."""

    rows: list[int]
    tokens: list[tuple[int, ...]]
    logprobs: list[RowLogprobs]


class Beams:
    def __init__(self, open_requests: OpenRequests, running_set: RunningSet, tables: BlockTables) -> None:
        self._open = open_requests
        self._running_set = running_set
        self._tables = tables

    def take(self, launched: PlanInFlight, result: StepResult, now: float) -> Shown:
        """Every beam that came back with a plan, after failures and dead rows were sorted out."""
        shown = Shown([], [], [])
        entries = {entry.row: entry for entry in result.logprobs}
        planned = zip(launched.sequences, launched.epochs, launched.expected, strict=True)
        for sequence, epoch, expected in planned:
            request, search = sequence.request, sequence.request.search
            if search is None or not expected or sequence.epoch != epoch:
                continue
            entry = entries.get(sequence.row)
            if entry is None or not search.fits(entry):
                self._open.fail(sequence, "the worker gave no candidates for a beam", "engine_request_failed")
            elif search.note(request.sequences.index(sequence), entry):
                steps = search.decide()
                if steps is None:
                    self._finish(request, shown, now)
                else:
                    self._go_on(request, steps, {row: entry.token_ids[:4] for row, entry in entries.items()})
        return shown

    def _go_on(self, request: Request, steps: list[Step], sampled: dict[int, bytes]) -> None:
        """Move the beams to their new parents. No sequence of the request is in a plan now, so all may change their
        blocks.

        sampled: the token that the worker itself put at the end of each row.
        """
        sequences = request.sequences
        for sequence in sequences:
            if sequence.capacity:
                self._tables.cache_blocks(sequence)
        for step in steps:
            sequence, parent = sequences[step.place], sequences[step.parent]
            if sequence is not parent:  # parents keep their blocks, so no block is needed after it was given up
                self._tables.share(parent.tables)
                self._running_set.adopt(sequence, parent)
        for step in steps:
            sequence, parent = sequences[step.place], sequences[step.parent]
            length = len(sequence.tokens)
            sequence.tokens.append(step.token)
            token = array("i", [step.token]).tobytes()
            if sequence.known_to_worker and (sequence is not parent or sampled.get(sequence.row) != token):
                self._running_set.forks.append(RowFork(sequence.row, parent.row, length, step.token))

    def _finish(self, request: Request, shown: Shown, now: float) -> None:
        assert request.search is not None
        for sequence in request.sequences:
            if sequence.capacity:
                self._tables.cache_all_blocks(sequence)
                sequence.cache_age = -1  # its tokens will not be those of its blocks
        for sequence, answer in zip(request.sequences, request.search.answers, strict=False):
            path = answer.steps()
            tokens = [step.token for step in path]
            sequence.tokens = sequence.tokens[: request.num_prompt_tokens]
            sequence.tokens.extend(tokens)
            sequence.last_token = LastToken(now)
            shown.rows.append(sequence.row)
            shown.tokens.append(tuple(tokens))
            shown.logprobs.append(_describe(sequence, answer, request.search.settings.logprobs))
            finished = _finished(sequence, answer)
            request.reason = finished.reason
            self._open.finished.append(finished)
        for sequence in request.sequences:
            self._open.end(sequence, Event.STOP)


def _finished(sequence: Sequence, answer: Answer) -> RowFinished:
    stop = answer.stop_token
    if stop is None:
        return RowFinished(sequence.row, "length")
    return RowFinished(sequence.row, "stop", None if stop in sequence.eos_token_ids else stop, True)


def _describe(sequence: Sequence, answer: Answer, alternatives: int) -> RowLogprobs:
    """Each token of an answer with its log-probability and the likeliest ones of its step."""
    tokens, logprobs, ranks = array("i"), array("f"), array("i")
    for step in answer.steps():
        tokens.append(step.token)
        logprobs.append(step.logprob)
        ranks.append(step.rank)
        tokens.extend(step.alternatives[:alternatives])
        logprobs.extend(step.alternatives_logprobs[:alternatives])
    return RowLogprobs(
        row=sequence.row,
        position=sequence.num_prompt_tokens,
        width=alternatives + 1,
        token_ids=tokens.tobytes(),
        logprobs=logprobs.tobytes(),
        ranks=ranks.tobytes(),
    )
