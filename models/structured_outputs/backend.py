"""The interface of a grammar backend: it compiles programs into matchers, and a matcher computes the allowed tokens.

A matcher is one row's place in its grammar. Its row gives it every generated token, has it fill a mask, and may take
tokens back. No method raises for a grammar or a token: a matcher that cannot go on sets `error`.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideSpec

Masks = NDArray[np.int32]
"""[rows, ceil(vocab / 32)]: bit i of word w is token 32 * w + i; 1 allows it."""


MASK_SECONDS: Final = 2e-3
"""CPU time that each mask of a row may take; it is charged for more."""


class GuideError(Exception):
    """A grammar that cannot be compiled. The text is fit for clients and does not name a request field."""


class BackendError(GuideError):
    """Nothing can be compiled here, for any grammar: no request is at fault."""


class Matcher(Protocol):
    """One row's place in its grammar."""

    @property
    def stopped(self) -> bool:
        """True if the grammar is complete: only an end token can follow."""

    @property
    def accepting(self) -> bool:
        """True if the text so far fits the grammar, though more could come."""

    @property
    def error(self) -> str | None:
        """The reason why it cannot go on; once set, it stays."""

    @property
    def spent(self) -> bool:
        """True if it cannot go on because it and all copies of its start have used up their shared limits."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Take in generated tokens; False, and an error, when they do not fit."""

    def fits(self, token_id: int) -> bool:
        """True if this token may come next; nothing changes."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""

    def forced(self) -> list[int]:
        """Tokens of which each is the only one allowed at its place; often none."""

    def copy(self) -> "Matcher":
        """A second matcher at the same place, for another row."""


class Backend(Protocol):
    """Makes matchers for one vocabulary. Thread-safe, as long as one thread at a time uses a matcher."""

    name: str
    special_tokens: Mapping[str, int]
    """Tokens that stand for no text, by their names: grammars must name them."""

    def compile(self, text: str) -> Matcher:
        """A matcher at the start of a grammar. Slow for large grammars.

        Args:
            text: as `translate` made it for this backend.

        Raises:
            GuideError: the grammar is wrong or too complex.
        """

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> Sequence[float]:
        """Write each matcher's mask into the row of its index, on several threads where that pays.

        Returns:
            CPU seconds of each, with what its tokens since the last mask are charged with; empty where they were not
            taken one by one, which goes on only while all are quick.
        """


class BackendPlugIn(Protocol):
    """The object behind an entry point of the group `troupellm.guide_backends`."""

    def __call__(self, tokenizer: Tokenizer, num_tokens: int, num_threads: int) -> Backend:
        """
        Args:
            num_tokens: that masks speak of.
            num_threads: for filling masks.

        Raises:
            BackendError: it cannot be used, or cannot read this tokenizer.
        """

    def program_text(self, spec: GuideSpec, depth: int) -> str:
        """A guide as the backend's `compile` reads it.

        Raises:
            GuideError: the backend cannot serve it.
        """
