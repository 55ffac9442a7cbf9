"""A request of a fleet: what its reader has, so that another replica can continue it, and where it is now."""

from array import array

import msgspec

from troupellm.actors.admission.admission import AdmissionSlot
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.runtime.waiter import Waiter, new_waiter
from troupellm.protocol.errors import TroupeError
from troupellm.protocol.messages.input import Generated, Submission, TokensPrompt
from troupellm.protocol.params.outputs import Delta, Usage
from troupellm.protocol.wire.api_process import Chunk, Submit


class FleetRequest:
    """From its place in the fleet to its end."""

    def __init__(self, submission: Submission, slot: AdmissionSlot, outbox: LocalOutbox) -> None:
        self.submission = submission
        self.slot = slot
        self.outbox = outbox
        self.prompt = TokensPrompt(())
        """Without its token ids."""
        self.prompt_bytes = b""
        """int32 [prompt_tokens]."""
        self.keys: list[bytes] = []
        """Of the prompt's full blocks; empty where replicas are not chosen by prefixes."""
        self.number = 0
        """At its replica."""
        self.cost = 0
        """At its replica; see `cost_of`."""
        self.submitted = False
        """Its replica has the prompt."""
        self.answered: Waiter = new_waiter()
        """Woken once it is clear whether its replica has a place."""
        self.admitted = False
        self.refusal: TroupeError | None = None
        self.moves = 0
        """How often its replica died."""
        self.moved = False
        """It has left a replica for another one."""
        self.first_token: float | None = None
        """Seconds on the clock."""
        self.spent: Usage | None = None
        """As its replica counted it at the end, also where that was an error."""
        num_sequences = submission.params.num_sequences
        self._tokens = [array("i") for _ in range(num_sequences)]
        self._ended: set[int] = set()
        self._begun: list[Chunk] = []
        """Chunks of a delta whose rest has not come."""
        self._prompt_entries_known = 0
        """Log-probabilities of the prompt that another replica has told."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_bytes) // 4

    @property
    def complete(self) -> bool:
        """Every sequence has ended."""
        return len(self._ended) == len(self._tokens)

    @property
    def begun(self) -> bool:
        """Its reader has tokens, or ends of sequences."""
        return bool(self._ended) or any(self._tokens)

    def prepared(self, prompt: TokensPrompt) -> None:
        """Its prompt has been read and found valid."""
        self.prompt_bytes = array("i", prompt.token_ids).tobytes()
        self.prompt = msgspec.structs.replace(prompt, token_ids=())

    def charged(self) -> Usage:
        """The usage that its tenant pays: the replica's count, else the part that its reader knows."""
        if self.spent is not None:
            return self.spent
        usage = self.usage()
        return usage if self.begun else msgspec.structs.replace(usage, prompt_tokens=0)

    def usage(self) -> Usage:
        """As far as its reader knows it."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(map(len, self._tokens)),
            truncated=self.prompt.truncated,
        )

    def leave(self, *, died: bool) -> None:
        """It is at no replica any more."""
        self.moves += died
        self.moved = True
        self.submitted = self.admitted = False
        self.refusal = None
        self._begun.clear()
        self._prompt_entries_known = 0 if self.begun else len(self.outbox.logprobs_of_prompt or ())

    def take(self, chunk: Chunk) -> Delta | None:
        """The delta that a chunk completes."""
        if chunk.more:
            self._begun.append(chunk)
            return None
        delta = _delta([*self._begun, chunk])
        self._begun.clear()
        self._tokens[delta.index].extend(delta.token_ids)
        if delta.finish_reason is not None:
            self._ended.add(delta.index)
        return delta

    def take_prompt(self, entries: tuple[object, ...]) -> int:
        """How many log-probabilities of the prompt its reader has already, of those that come now."""
        known = min(self._prompt_entries_known, len(entries))
        self._prompt_entries_known -= known
        return known

    def submit(self) -> Submit:
        """The message for its replica, with the tokens that its reader has."""
        submission, params = self.submission, self.submission.params
        generated: tuple[Generated, ...] = ()
        if self.begun:
            generated = tuple(
                Generated(tokens.tobytes(), index in self._ended) for index, tokens in enumerate(self._tokens)
            )
        return Submit(
            request=self.number,
            request_id=submission.request_id,
            prompt=self.prompt_bytes,
            params=params,
            streaming=submission.streaming,
            cache_salt=submission.cache_salt,
            pooling=submission.pooling,
            truncated=self.prompt.truncated,
            segment=self.prompt.segment,
            leases=self.prompt.leases,
            hints=submission.hints,
            adapter=submission.adapter,
            generated=generated,
        )


def with_seed(submission: Submission, seed: int) -> Submission:
    """A request whose draws do not depend on the replica."""
    params = submission.params
    if submission.pooling is not None or params.seed not in (None, -1):
        return submission
    return msgspec.structs.replace(submission, params=msgspec.structs.replace(params, seed=seed))


def _delta(chunks: list[Chunk]) -> Delta:
    first, last = chunks[0], chunks[-1]
    if len(chunks) == 1:
        token_ids, logprobs = first.token_ids, first.logprobs
    else:
        token_ids = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)
        logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs or ())
    return Delta(
        index=first.index,
        text=first.text,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
