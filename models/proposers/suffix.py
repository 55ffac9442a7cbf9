"""Suffix decoding: proposes the tokens that followed an earlier occurrence of a row's end.

Earlier occurrences are in the row itself or in past outputs of its tenant. After Oliaro et al., "SuffixDecoding:
extreme speculative decoding for emerging AI applications" (arXiv 2411.04975). The longest suffix of the row that
occurred before is searched. Its occurrences vote on each next token, and a longer match gives more drafts.

Where the paper keeps suffix trees, and others suffix automata, this keeps the texts with chains of n-grams
(`match_index`). A tree or automaton has every match and its counts at hand, but it grows token by token, with a table
of successors for every state. The rows of a step would wait for a long prompt, most of which may come from the prefix
cache, and a part of its texts cannot be removed. Arrays take in a prompt at once, and the oldest output is overwritten
in place; a token takes 68 bytes.

A chain is walked for a few places only. Two measures find the longest match all the same. Short matches have chains for
each length. Long matches are followed: the places of the last match that continued as the row did are a longer match.
The number of other places that agree with the row's very last tokens does not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from troupellm.models.batch.row_drafts import Drafts
from troupellm.models.layers.aux_hidden_states import NO_AUX_HIDDEN_STATES
from troupellm.models.proposers.base import Observation, ProposalBatch
from troupellm.models.proposers.ngram import catch_up, follow, last_tokens, ring_capacity
from troupellm.models.proposers.registry import ProposerContext
from troupellm.models.proposers.suffix_history import PastOutputs
from troupellm.models.proposers.suffix_index import NO_MATCH, Match, MatchIndex
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.messages.proposer_report import ProposerReport
from troupellm.protocol.messages.worker import NewRow

SIZES: Final = (1, 2, 3, 4, 8)
"""Lengths with a chain. Other matches are found on that of the next shorter one."""
TRIES: Final = 24
"""Places that are compared, of each length."""
VOTERS: Final = 12
"""Places that decide, the most recent ones of the longest match. Of up to ten each would have a share that the
usual least probability lets pass."""
VOTERS_OF_ONE: Final = 3
"""The same number for a match of a single token, which is weak evidence: all of them must agree."""


class _Guess(NamedTuple):
    tokens: list[int]
    score: float
    """Tokens that are expected to be right: sum of the estimated probabilities."""


class _Find(Protocol):
    """As `MatchIndex.find`, of certain texts."""

    def __call__(self, level: int, value: int, context: list[int], /, *, tries: int, most: int) -> Match: ...


@dataclass(slots=True)
class _Row:
    index: MatchIndex
    tenant: str = ""
    written: int = 0
    """Tokens that are no past output: the prompt, and tokens that were kept already when the row came back."""
    seen: int = 0
    """The index's end when the row was last asked."""
    own: Match = NO_MATCH
    """Match in its own text at the last look."""
    past: Match = NO_MATCH
    """Match in past outputs at the last look."""
    owner: int | None = None
    """Owner of these outputs."""


def make(config: SpeculativeConfig, context: ProposerContext) -> "SuffixProposer":
    return SuffixProposer(
        max_tree_depth=config.suffix_decoding_max_tree_depth,
        max_cached_requests=config.suffix_decoding_max_cached_requests,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
        max_model_len=context.max_model_len,
    )


class SuffixProposer:
    """Drafts out of each row's own tokens and its tenant's past outputs."""

    aux_hidden_states = NO_AUX_HIDDEN_STATES

    def __init__(
        self,
        *,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        max_model_len: int,
    ) -> None:
        """
        Args:
            max_tree_depth: most tokens of a match and its drafts together.
            max_cached_requests: past outputs that are kept, of all tenants.
            max_spec_factor: drafts per token of the match.
            min_token_prob: least estimated probability of a draft and all before it.
        """
        self._depth, self._factor, self._least = max_tree_depth, max_spec_factor, min_token_prob
        # A longer match would leave less room behind it than its length allows to draft.
        self._reach = max(1, int(max_tree_depth / (1 + max_spec_factor)))
        self._sizes = tuple(size for size in SIZES if size <= self._reach)
        self._capacity = ring_capacity(max_model_len)
        self._rows: dict[int, _Row] = {}
        self._row_bytes = 0
        self.past = PastOutputs(self._sizes, most_texts=max_cached_requests)

    def add_row(self, slot: int, new: NewRow) -> None:
        row = self._rows.get(slot)
        if row is None:
            row = self._rows[slot] = _Row(MatchIndex(self._sizes, self._capacity))
            self._row_bytes = row.index.nbytes
        row.index.restart()
        row.index.forget_before(row.index.end)
        row.tenant, row.seen = new.tenant, row.index.end
        row.own = row.past = NO_MATCH
        # A row that comes back after a preemption was kept as far as it was when it left.
        row.written = max(new.num_prompt_tokens, len(new.token_ids) // 4)

    def drop_row(self, slot: int, token_ids: NDArray[np.int32]) -> None:
        """Its output becomes a past one, behind the end of its prompt, which a later request has before its own."""
        row = self._rows.get(slot)
        if row is not None and token_ids.size > row.written:
            self.past.add(row.tenant, token_ids[max(0, row.written - self._reach) :])
            row.written = token_ids.size

    def reset(self) -> None:
        self._rows.clear()

    def report(self) -> ProposerReport:
        past = self.past
        return ProposerReport(
            past_outputs=len(past),
            past_tokens=past.num_tokens,
            past_tokens_capacity=past.capacity,
            past_evictions=past.num_evicted,
            memory_bytes=past.nbytes + len(self._rows) * self._row_bytes,
        )

    def observe(self, seen: Observation) -> None:
        """Never called: there are no aux hidden states."""

    def propose(self, batch: ProposalBatch) -> Drafts:
        rows = [self._rows[slot] for slot in batch.slots.tolist()]
        catch_up([row.index for row in rows], batch)
        drafts = np.zeros((len(rows), int(batch.limits.max())), np.int32)
        counts = np.zeros(len(rows), np.int64)
        for place, (row, limit) in enumerate(zip(rows, batch.limits.tolist(), strict=True)):
            found = self._guess(row, limit)
            if found:
                counts[place] = len(found)
                drafts[place, : len(found)] = found
        return Drafts(drafts, counts)

    def _guess(self, row: _Row, limit: int) -> list[int]:
        index, owner = row.index, self.past.owner(row.tenant)
        context = last_tokens(index, self._reach)
        self._follow(row, context, owner)
        row.own = self._longest(row.own, index.find, index.hashes, context)
        own = self._vote(row.own, limit, partial(follow, index))
        if owner is None or own.score >= limit:  # nothing can be surer
            return own.tokens
        row.past = self._longest(row.past, partial(self.past.find, owner), index.hashes, context)
        past = self._vote(row.past, limit, self.past.follow)
        return past.tokens if past.score > own.score else own.tokens

    def _follow(self, row: _Row, context: list[int], owner: int | None) -> None:
        """Leave of the row's last matches the places that went on as the row did since.

        Args:
            owner: of its tenant's outputs. A number is never given twice, so places of the same one are what they were.
        """
        said, row.seen = row.index.end - row.seen, row.index.end
        if said > len(context):  # the row was not queried for so long that all matches must be found anew
            row.own = row.past = NO_MATCH
        if owner != row.owner:
            row.owner, row.past = owner, NO_MATCH
        tokens = context[max(0, len(context) - said) :]
        row.own = row.index.advance(row.own, tokens, self._reach)
        row.past = self.past.advance(row.past, tokens, self._reach)

    def _longest(self, followed: Match, find: _Find, hashes: list[int], context: list[int]) -> Match:
        """The longest match that is found, unless one that was followed is longer."""
        longest = self._reach
        for level in range(len(self._sizes) - 1, -1, -1):
            if followed.length > longest:
                break
            size = self._sizes[level]
            if size <= len(context):
                most = VOTERS if size > 1 else VOTERS_OF_ONE
                match = find(level, hashes[level], context[-longest:], tries=TRIES, most=most)
                if match.length:
                    return match if match.length >= followed.length else followed
            longest = size - 1  # there is none of this size
        return followed

    def _vote(self, match: Match, limit: int, behind: Callable[[int, int], list[int]]) -> _Guess:
        """The most frequent token of each place among the paths that went along so far; the most recent one of equals.

        Args:
            behind: tokens behind a position, up to a number of them; fewer where the text ends.
        """
        count = min(limit, int(self._factor * match.length), self._depth - match.length)
        least = self._least if match.length > 1 else 1.0
        paths = [behind(position, count) for position in match.positions]
        guess, score, probability = list[int](), 0.0, 1.0
        while paths and len(guess) < count:
            place = len(guess)
            if all(path == paths[0] for path in paths):
                rest = paths[0][place:]
                return _Guess(guess + rest, score + probability * len(rest))
            votes = dict[int, int]()
            for path in paths:
                if len(path) > place:
                    votes[path[place]] = votes.get(path[place], 0) + 1
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)
            probability *= votes[token] / len(paths)
            if probability < least:
                break
            guess.append(token)
            score += probability
            paths = [path for path in paths if len(path) > place and path[place] == token]
        return _Guess(guess, score)
