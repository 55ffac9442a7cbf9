"""llguidance: compiles lazily, so that a grammar is ready in a millisecond, and computes masks in microseconds."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter, thread_time
from typing import Final, cast

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from troupellm.models.structured_outputs.backend import MASK_SECONDS, GuideError, Masks, Matcher
from troupellm.models.tokenizer.tokenizer import Tokenizer

FEW_MATCHERS = 4
"""Up to this number, masks are filled on the calling thread: waking others takes longer."""
MOST_ITEMS: Final = 300
"""Ways in which a text may be read so far, after each token. A mask takes time by their product with the vocabulary;
JSON schemas get by with a handful, and with one for each alternative of an anyOf."""
MOST_LEXER_STATES: Final = 20_000
"""Most states of one grammar, 0.35 kB each, which live as long as it is kept."""
SLOW_SECONDS: Final = 1e-3
"""Where masks that several threads fill take longer than this on average, they are timed one by one: to read a
thread's clock is a system call, too much for each quick one. On one thread they are where all of a call take longer
than one mask may."""
WATCHED_CALLS: Final = 1000
"""Number of calls that are timed then: a row may be slow once, and the slow mask is not known at first."""
_LEXER = "lexer error"
"""Part of errors about limits that a grammar's copies share."""
_LONGEST_REASON = 300
_SPECIAL = b"\xff"
"""Before the bytes of tokens that no text stands for."""
_PLAINER = (
    ("NoExtensionBias", "no output can fit it"),
    ("regex parse error:", "pattern:"),
    (
        "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
        "oneOf is only supported where its schemas exclude each other; use anyOf",
    ),
    ("min/maxProperties only", "minProperties and maxProperties are only"),
    ("Pointer '", "$ref: pointer '"),
    ("invalid multiple of", "multipleOf must be above 0"),
    ("schema must be an object or boolean", "each schema, in items too, must be an object or a boolean"),
)
"""Texts of llguidance that do not name the keyword."""
_IN_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*?)(?: \d+ \| .*)?")
"""An error in a schema within a generated grammar: the place, the reason, and lines of that grammar."""
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


def limits() -> LLParserLimits:
    """The limits of one grammar: compile time (about 20 ms), time per mask (a few ms), and memory (about 7 MB). Errors
    come without internals."""
    return LLParserLimits(verbose_errors=False, max_items_in_row=MOST_ITEMS, max_lexer_states=MOST_LEXER_STATES)


def vocabulary(tokenizer: Tokenizer, num_tokens: int) -> LLTokenizer:
    """llguidance's view of a vocabulary.

    Args:
        num_tokens: that masks speak of; the last one is never drawn.

    Raises:
        ValueError: the library cannot read this tokenizer.
    """
    ends = sorted(tokenizer.eos_token_ids)
    if not ends:  # the library knows no such models: it is given one that ends with what is never drawn
        pieces = _Pieces(tokenizer, num_tokens)
        return LLTokenizer(TokenizerWrapper(pieces), n_vocab=num_tokens, eos_token=pieces.eos_token_id)
    return LLTokenizer(tokenizer.definition(), n_vocab=num_tokens, eos_token=ends)


class _Pieces:
    """A vocabulary as bytes, with one token more for the end."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        if tokenizer.form == "other":
            raise ValueError("its tokens are no plain bytes")
        special = tokenizer.special_token_ids
        marks = (_SPECIAL if token in special else b"" for token in range(num_tokens - 1))
        self.tokens = [mark + tokenizer.token_bytes(token) for token, mark in enumerate(marks)]
        self.tokens.append(_SPECIAL + b"<|end|>")
        self.eos_token_id = num_tokens - 1
        self.special_token_ids = [*sorted(special), self.eos_token_id]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_special_tokens=False)


def vocabulary_marks(tokenizer: Tokenizer, tokens: LLTokenizer) -> dict[str, int]:
    """The tokens that llguidance does not treat as text: added ones such as <tool_call>."""
    added = tokenizer.added_tokens.items()
    return {text: token_id for text, token_id in added if text and tokens.is_special_token(token_id)}


class LLGuidanceMatcher:
    """Implements `Matcher`."""

    __slots__ = ("inner",)

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    @property
    def stopped(self) -> bool:
        return self.inner.is_stopped()

    @property
    def accepting(self) -> bool:
        return self.inner.is_accepting()

    @property
    def error(self) -> str | None:
        return reason(self.inner.get_error()) if self.inner.is_error() else None

    @property
    def spent(self) -> bool:
        return self.inner.is_error() and _LEXER in self.inner.get_error()

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.inner.consume_tokens(token_ids if isinstance(token_ids, list) else list(token_ids))

    def fits(self, token_id: int) -> bool:
        return self.inner.validate_tokens([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.inner.rollback(num_tokens)

    def forced(self) -> list[int]:
        return self.inner.compute_ff_tokens()

    def copy(self) -> "LLGuidanceMatcher":
        return LLGuidanceMatcher(self.inner.deep_copy())


class LLGuidance:
    """Implements `Backend`."""

    name = "llguidance"

    def __init__(
        self, tokens: LLTokenizer, num_threads: int = 1, special_tokens: Mapping[str, int] | None = None
    ) -> None:
        """
        Args:
            num_threads: for filling masks.
            special_tokens: see `vocabulary_marks`.
        """
        self._tokens = tokens
        self.special_tokens = special_tokens or {}
        self._limits = limits()
        self._executor: LLExecutor | None = None
        self._num_threads = num_threads
        self._watched = 0
        """Calls whose masks are still timed one by one."""
        self._timers: ThreadPoolExecutor | None = None

    def compile(self, text: str) -> LLGuidanceMatcher:
        inner = LLMatcher(self._tokens, text, log_level=0, limits=self._limits)
        if inner.is_error():
            raise GuideError(reason(inner.get_error()))
        return LLGuidanceMatcher(inner)

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> Sequence[float]:
        inner = [matcher.inner for matcher in cast(Sequence[LLGuidanceMatcher], matchers)]
        row_bytes = masks.shape[1] * masks.itemsize
        first = masks.ctypes.data
        places = range(first, first + len(inner) * row_bytes, row_bytes)
        if self._num_threads == 1 or len(inner) <= FEW_MATCHERS:
            return self._fill_here(inner, places, row_bytes)
        if self._executor is None:
            self._executor = LLExecutor(self._num_threads)
        begin = perf_counter()
        seconds: list[float] = []
        if self._watched:
            if self._timers is None:
                self._timers = ThreadPoolExecutor(self._num_threads, "troupellm-masks")
            seconds = list(self._timers.map(_fill_one, inner, places, [row_bytes] * len(inner)))
        else:
            numbered = list(zip(inner, range(len(inner)), strict=True))
            self._executor.unsafe_compute_mask_ptr(numbered, first, row_bytes, masks.shape[0])
        self._watch(perf_counter() - begin > SLOW_SECONDS * len(inner) / self._num_threads)
        return seconds

    def _fill_here(self, inner: Sequence[LLMatcher], places: Sequence[int], row_bytes: int) -> Sequence[float]:
        """Fill the masks one after the other, on this thread."""
        seconds: list[float] = []
        begin = end = thread_time()
        if self._watched or len(inner) <= FEW_MATCHERS:
            for matcher, place in zip(inner, places, strict=True):
                matcher.unsafe_compute_mask_ptr(place, row_bytes)
                last, end = end, thread_time()
                seconds.append(end - last)
        else:
            for matcher, place in zip(inner, places, strict=True):
                matcher.unsafe_compute_mask_ptr(place, row_bytes)
            end = thread_time()
        self._watch(end - begin > MASK_SECONDS)
        return seconds

    def _watch(self, slow: bool) -> None:
        """slow: so were the masks of a call."""
        self._watched = WATCHED_CALLS if slow else max(0, self._watched - 1)


def _fill_one(matcher: LLMatcher, place: int, row_bytes: int) -> float:
    """CPU seconds of filling one mask, independent of other load on the machine.

    Args:
        place: where it is written.
    """
    begin = thread_time()
    matcher.unsafe_compute_mask_ptr(place, row_bytes)
    return thread_time() - begin


def reason(error: str) -> str:
    """The first lines of llguidance's error: behind them it shows its own state."""
    head = " ".join(error.partition("<state>")[0].replace("<non-verbose/>", "").split())
    inner = _IN_SCHEMA.fullmatch(head)
    if inner is not None:
        head = inner[1]
    unsupported = _UNSUPPORTED.search(head)
    if unsupported is not None:
        keywords = ", ".join(re.findall(r'"([^"]*)"', unsupported[1]))
        head = f"the keyword {keywords} is not supported"
    for text, plain in _PLAINER:
        head = head.replace(text, plain)
    return head[:_LONGEST_REASON] or "the grammar cannot be compiled"
