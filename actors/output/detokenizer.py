"""Token ids to text that is safe to show: the synchronous core of the output actor.

A text is never taken back. Bytes that are not a whole character yet are held, and so is the beginning of what may be a
stop string; both are let go when the sequence ends.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from troupellm.actors.output.stop_strings import RegionText, StopRegions, StopStrings
from troupellm.models.tokenizer.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_SAMPLE_TOKENS = 4096
_MOST_VARIANTS = 8
"""Tables with some special tokens kept; a model needs one or two."""


class Decoder(Protocol):
    """Incremental decoding of one sequence."""

    def step(self, token_id: int) -> str:
        """The text that became certain with this token."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens."""

    def flush(self) -> str:
        """The text that was held back; the sequence has ended."""


class TextTables:
    """The text that each token of the vocabulary adds; shared by all sequences.

    An entry is None where the token cannot be looked at alone: it holds part of a character, or stands for a byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.raw = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.size)]
        self.alone = [raw.decode("utf-8", "replace") for raw in self.raw]
        """Each token's own text, for log-probabilities."""
        self.shown: list[str | None] = [
            None if token_id in tokenizer.byte_token_ids else _whole(raw) for token_id, raw in enumerate(self.raw)
        ]
        self.skipping: list[str | None] = [
            "" if token_id in tokenizer.special_token_ids else piece for token_id, piece in enumerate(self.shown)
        ]
        self._keeping: dict[tuple[int, ...], list[str | None]] = {}
        self.trusted = tokenizer.form != "other" and self._agrees_with_library()
        """Whether the tables give what the library gives; otherwise the library decodes."""

    def decoder(self, *, skip_special_tokens: bool, spaces: bool = True, kept: tuple[int, ...] = ()) -> Decoder:
        """
        Args:
            spaces: False leaves out what some tokenizers put between two special tokens in a row; tables never do.
            kept: special tokens that are text although others are skipped.
        """
        if not self.trusted:
            return LibraryDecoder(self.tokenizer, skip_special_tokens, spaces=spaces, kept=kept)
        pieces = self.pieces(skip_special_tokens=skip_special_tokens, kept=kept)
        if self.tokenizer.form == "byte_fallback":
            return ByteFallbackDecoder(pieces, self.raw)
        return ByteLevelDecoder(pieces, self.raw)

    def pieces(self, *, skip_special_tokens: bool, kept: tuple[int, ...] = ()) -> list[str | None]:
        """Text by token id; for the fast path of sequences whose decoder is clean."""
        if not self.trusted:
            return []
        if not skip_special_tokens:
            return self.shown
        return self._skipping_but(kept) if kept else self.skipping

    def _skipping_but(self, kept: tuple[int, ...]) -> list[str | None]:
        table = self._keeping.get(kept)
        if table is None:
            if len(self._keeping) >= _MOST_VARIANTS:
                self._keeping.clear()
            table = self._keeping[kept] = self.skipping.copy()
            for token_id in kept:
                if token_id < len(table):
                    table[token_id] = self.shown[token_id]
        return table

    def _agrees_with_library(self) -> bool:
        """Compare on a sample over the whole vocabulary: partial characters included, single bytes of fallback not.

        A leading space is left out of the comparison: SentencePiece's decoder strips it from the start of a text, and
        what is decoded here continues a prompt.
        """
        self.trusted = True
        stride = self.tokenizer.size // _SAMPLE_TOKENS + 1
        sample = [i for i in range(0, self.tokenizer.size, stride) if i not in self.tokenizer.byte_token_ids]
        for skip in (False, True):
            decoder = self.decoder(skip_special_tokens=skip)
            ours = "".join(decoder.step(token_id) for token_id in sample) + decoder.flush()
            theirs = self.tokenizer.decode(sample, skip_special_tokens=skip)
            if ours.lstrip(" ") != theirs.lstrip(" "):
                return False
        return True


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


class _TableDecoder:
    """Several tokens at once are a join of their table entries, unless a character is cut."""

    __slots__ = ("_broken", "_held", "_pieces", "_raw")

    def __init__(self, pieces: Sequence[str | None], raw: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._raw = raw
        self._held = b""
        self._broken = False
        """In a run of byte tokens that has a mistake."""

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        if not (self._held or self._broken):  # a whole token's text is simply its table entry
            try:
                if len(token_ids) == 1:  # every reader is woken at every step
                    piece = pieces[token_ids[0]]
                    return self.step(token_ids[0]) if piece is None else piece
                return "".join([pieces[token_id] for token_id in token_ids])  # type: ignore[misc]
            except (TypeError, IndexError):  # one is None, or a padded row of the logits
                pass
        return "".join([self.step(token_id) for token_id in token_ids])

    def step(self, token_id: int) -> str:
        raise NotImplementedError


class ByteLevelDecoder(_TableDecoder):
    """A text is the UTF-8 of all tokens' bytes in a row."""

    __slots__ = ()

    def step(self, token_id: int) -> str:
        if token_id >= len(self._pieces):
            return ""  # a padded row of the logits
        piece = self._pieces[token_id]
        if piece == "" or (piece is not None and not self._held):
            return piece
        data = self._held + self._raw[token_id]
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._held = data[consumed:]
        return text

    def flush(self) -> str:
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text


class ByteFallbackDecoder(_TableDecoder):
    """Tokens are text, but for byte tokens, whose unbroken runs are decoded together.

    A run shows a replacement character for every byte that belongs to no whole character. The library does so for all
    bytes of a run with a mistake; here whole characters before the first mistake were shown already, and stay.
    """

    __slots__ = ()

    def step(self, token_id: int) -> str:
        if token_id >= len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        if piece is None:
            return self._byte(self._raw[token_id])
        if not piece or not (self._held or self._broken):
            return piece
        return self.flush() + piece

    def flush(self) -> str:
        text = REPLACEMENT * len(self._held)
        self._held = b""
        self._broken = False
        return text

    def _byte(self, byte: bytes) -> str:
        if self._broken:
            return REPLACEMENT
        data = self._held + byte
        try:
            text, consumed = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._held = b""
            self._broken = True
            return REPLACEMENT * len(data)
        self._held = data[consumed:]
        return text


class LibraryDecoder:
    """Any other form: the library's stream, and what it still held back from a full decode at the end."""

    __slots__ = ("_dropped", "_ids", "_joined", "_shown", "_skip", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, *, spaces: bool = True, kept: tuple[int, ...] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._dropped = tokenizer.special_token_ids.difference(kept) if skip_special_tokens and kept else frozenset()
        self._skip = skip_special_tokens and not kept
        self._stream = tokenizer.decode_stream(skip_special_tokens=self._skip)
        self._ids: list[int] = []
        self._shown: list[str] = []
        self._joined = not spaces and not skip_special_tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self.step(token_id) for token_id in token_ids])

    def step(self, token_id: int) -> str:
        if token_id in self._dropped:
            return ""
        self._ids.append(token_id)
        text = self._stream.step(token_id)
        self._shown.append(text)
        special = self._tokenizer.special_token_ids
        if self._joined and token_id in special and len(self._ids) > 1 and self._ids[-2] in special:
            return text.lstrip(" ")
        return text

    def flush(self) -> str:
        whole, shown = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip), "".join(self._shown)
        return whole[len(shown) :] if whole.startswith(shown) else ""


class SequenceText:
    """One sequence's text up to its stop string."""

    __slots__ = ("_count", "_decoder", "_held", "_include_stop", "_min_tokens", "_regions", "_state", "_stops")

    def __init__(
        self,
        decoder: Decoder,
        stops: StopStrings | None,
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        regions: StopRegions | None = None,
    ) -> None:
        """
        Args:
            regions: parts of the text in which stop strings do not count.
            include_stop: the stop string itself is part of the text.
            min_tokens: stop strings do not count in the text of so many first tokens.
        """
        self._decoder = decoder
        self._stops = stops
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._regions = None if regions is None or stops is None else RegionText(regions)
        self._count = 0
        self._state = 0
        self._held = ""

    @property
    def plain(self) -> bool:
        """True if no stop string is searched for, so tokens need not become text at once."""
        return self._stops is None

    @property
    def plain_feed(self) -> Callable[[Sequence[int]], str]:
        """`feed` for a `plain` text, whose tokens are all used."""
        return self._decoder.feed

    def feed_one(self, token_id: int) -> tuple[str, str | None]:
        """Take one new token; returns text to show, and the stop string when one was met."""
        self._count += 1
        return self._advance(self._decoder.step(token_id))

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Take new tokens.

        Returns:
            Text to show, how many of the tokens were used, and the stop string when one was met.
        """
        if self._stops is None:
            return self._decoder.feed(token_ids), len(token_ids), None
        texts: list[str] = []
        for used, token_id in enumerate(token_ids, 1):
            shown, stop = self.feed_one(token_id)
            texts.append(shown)
            if stop is not None:
                return "".join(texts), used, stop
        return "".join(texts), len(token_ids), None

    def finish(self) -> tuple[str, str | None]:
        """Everything held back, and the stop string when it completes one."""
        shown, stop = self._advance(self._decoder.flush())
        if stop is None and self._regions is not None:
            rest, stop = self._scan_parts(self._regions.rest())
            shown += rest
        if stop is None:
            shown, self._held = shown + self._held, ""
        return shown, stop

    def _advance(self, text: str) -> tuple[str, str | None]:
        if self._regions is None:
            return self._scan(text)
        return self._scan_parts(self._regions.split(text)) if text else ("", None)

    def _scan_parts(self, parts: Sequence[tuple[str, bool]]) -> tuple[str, str | None]:
        shown: list[str] = []
        for text, counts in parts:
            if not counts:
                shown.append(self._held + text)
                self._held, self._state = "", 0
                continue
            piece, stop = self._scan(text)
            shown.append(piece)
            if stop is not None:
                return "".join(shown), stop
        return "".join(shown), None

    def _scan(self, text: str) -> tuple[str, str | None]:
        stops = self._stops
        if stops is None or not text or self._count <= self._min_tokens:
            return text, None
        self._state, read, stop = stops.scan(self._state, text)
        text = self._held + text[:read]
        if stop is None:
            keep = len(text) - stops.depth[self._state]
            shown, self._held = text[:keep], text[keep:]
            return shown, None
        self._held = ""
        return (text if self._include_stop else text[: -len(stop)]), stop
