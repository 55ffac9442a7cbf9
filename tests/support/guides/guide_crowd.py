"""Rows of many grammars that are sampled together from made-up logits."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from troupellm.models.sampling.sampler import Sampler
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import GuideProgram

VOCAB = 2048
LOOSE_STEPS = 30
"""So many tokens come as they may; then what closes strings, lists and objects becomes likelier with each."""


class Crowd:
    """Rows that are sampled in one batch, as a worker does it, from random logits."""

    def __init__(self, library: GuideLibrary, tokenizer: Tokenizer, helper: ThreadPoolExecutor, seed: int = 0) -> None:
        self.guides = GuidedRows(library, helper)
        self.decoding = "strict"
        self.sampler = Sampler(VOCAB, torch.device("cpu"))
        self.tokenizer = tokenizer
        self._random = torch.Generator().manual_seed(seed)
        self._tokens: dict[int, list[int]] = {}
        self.finished: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        pieces = [tokenizer.token_bytes(token) for token in range(VOCAB)]
        closing = [piece[:1] in (b'"', b"}", b"]") for piece in pieces]
        self._closing = torch.tensor(closing).float()
        self._closing[sorted(tokenizer.eos_token_ids)] = 2.0
        self._spaces = torch.tensor([not piece.strip() for piece in pieces]).float()

    def add(self, row: int, program: GuideProgram, **options: Any) -> None:
        state = SamplingState(temperature=1.0, seed=row, guide=program, **options)
        self.sampler.add_row(row, state, [1], 1)
        self.guides.add(row, state, [])
        self._tokens[row] = [1]

    def run(self, steps: int) -> None:
        """Until all rows have ended, or so many tokens."""
        for step in range(steps):
            if not self._tokens:
                return
            self.step(max(0, step - LOOSE_STEPS))

    def step(self, urge: float) -> None:
        rows = list(self._tokens)
        filled = self.guides.begin(rows)
        logits = 3 * torch.randn(len(rows), VOCAB, generator=self._random)
        logits += min(20.0, urge / 2) * self._closing - min(20.0, urge) * self._spaces
        histories = [torch.tensor(self._tokens[row]) for row in rows]
        positions = [len(self._tokens[row]) for row in rows]
        masks = None if filled is None else self.guides.filled(filled)
        sampled = self.sampler.sample(logits, rows, positions, histories, masks)
        tokens = sampled.tokens.tolist()
        self.errors |= {error.row: error.message for error in sampled.errors}
        advanced = self.guides.advance(rows, [[token] * (token >= 0) for token in tokens], [1000] * len(rows))
        for row, token in zip(rows, tokens, strict=True):
            self._tokens[row] += [token, *advanced.forced.get(row, ())]
            if row in self.errors:
                self._drop(row)
            elif row in advanced.finished or token in self.tokenizer.eos_token_ids:
                self.finished[row] = self.text(row)
                self._drop(row)

    def text(self, row: int) -> str:
        tokens: Sequence[int] = self._tokens[row][1:]
        ends = self.tokenizer.eos_token_ids
        pieces = [self.tokenizer.token_bytes(token) for token in tokens if token not in ends]
        return b"".join(pieces).decode(errors=self.decoding)

    def _drop(self, row: int) -> None:
        del self._tokens[row]
        self.guides.drop(row)
        self.sampler.drop_row(row)
