"""Suffix decoding: what followed the end of a row before, in the row itself or in past outputs of its tenant.

After Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI applications" (arXiv 2411.04975).
The longest suffix of the row that stood before is looked for, the places where it stood vote on each next token, and
the longer the match the more is drafted. Where the paper keeps suffix trees, whose nodes count how often each path was
taken, this keeps the texts with chains of n-grams (`match_index`) and counts over the most recent places of the longest
match: a token of a past output takes 44 bytes instead of a path of nodes, and can be evicted again.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from troupellm.models.speculation.match_index import Match, MatchIndex
from troupellm.models.speculation.ngram import catch_up, follow, last_tokens, ring_capacity
from troupellm.models.speculation.past_outputs import PastOutputs
from troupellm.models.speculation.proposer import NO_TAPS, Drafts, Observation, ProposalBatch
from troupellm.models.speculation.registry import ProposerContext
from troupellm.protocol.proposer_report import ProposerReport
from troupellm.protocol.speculative import SpeculativeConfig
from troupellm.protocol.worker import NewRow

SIZES: Final = (2, 4, 8)
"""Matches are looked for from the longest of these lengths on."""
TRIES: Final = 24
"""Places that are compared, of each length."""
VOTERS: Final = 8
"""Places that decide, the most recent ones of the longest match."""


class _Guess(NamedTuple):
    tokens: list[int]
    score: float
    """Tokens that are expected to be right: sum of the estimated probabilities."""


_NOTHING: Final = _Guess([], 0.0)


@dataclass(slots=True)
class _Row:
    index: MatchIndex
    tenant: str = ""
    written: int = 0
    """Tokens that are no past output: the prompt, and what was kept already when the row came back."""


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

    taps = NO_TAPS

    def __init__(
        self, *, max_tree_depth: int, max_cached_requests: int, max_spec_factor: float, min_token_prob: float,
        max_model_len: int,
    ) -> None:  # fmt: skip
        """
        Args:
            max_tree_depth: most tokens of a match and what is drafted behind it, together.
            max_cached_requests: past outputs that are kept, of all tenants.
            max_spec_factor: drafts per token of the match.
            min_token_prob: least estimated probability of a draft and all before it.
        """
        self._depth, self._factor, self._least = max_tree_depth, max_spec_factor, min_token_prob
        # A longer match would leave less room behind it than its length allows to draft.
        self._reach = max(1, int(max_tree_depth / (1 + max_spec_factor)))
        sizes = tuple(size for size in SIZES if size <= self._reach) or (self._reach,)
        self._sizes, self._capacity = sizes, ring_capacity(max_model_len)
        self._rows: dict[int, _Row] = {}
        self._row_bytes = 0
        self.past = PastOutputs(sizes, most_texts=max_cached_requests)

    def add_row(self, slot: int, new: NewRow) -> None:
        row = self._rows.get(slot)
        if row is None:
            row = self._rows[slot] = _Row(MatchIndex(self._sizes, self._capacity))
            self._row_bytes = row.index.nbytes
        row.index.restart()
        row.index.forget_before(row.index.end)
        row.tenant = new.tenant
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
        """Never called: there are no taps."""

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
        own, past = _NOTHING, _NOTHING
        for level in range(len(self._sizes) - 1, -1, -1):
            if self._sizes[level] > len(context):
                continue
            value = index.hashes[level]
            if not own.tokens:
                match = index.find(level, value, context, tries=TRIES, most=VOTERS)
                count = self._most(match, limit)
                own = self._vote([follow(index, position, count) for position in match.positions], count)
            if owner is not None and not past.tokens:
                match = self.past.find(owner, level, value, context, tries=TRIES, most=VOTERS)
                count = self._most(match, limit)
                past = self._vote([self.past.follow(position, count) for position in match.positions], count)
            if own.tokens and (past.tokens or owner is None):
                break
        return past.tokens if past.score > own.score else own.tokens

    def _most(self, match: Match, limit: int) -> int:
        """Drafts behind a match."""
        return min(limit, int(self._factor * match.length), self._depth - match.length)

    def _vote(self, paths: list[list[int]], count: int) -> _Guess:
        """The most frequent token of each place among the paths that went along so far; the most recent one of equals.

        Args:
            paths: [places][up to count tokens], most recent first; a shorter one ended there.
        """
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
            if probability < self._least:
                break
            guess.append(token)
            score += probability
            paths = [path for path in paths if len(path) > place and path[place] == token]
        return _Guess(guess, score)
