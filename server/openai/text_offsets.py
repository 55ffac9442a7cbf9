"""Where tokens begin in the text that they make, in characters."""

import codecs

from troupellm.models.tokenizer.tokenizer import Tokenizer


class TextOffsets:
    """Follows the decoding of one text, token by token.

    The tokens of a split character share the character's offset; a token that is not shown has no length. Exact for
    byte level and byte fallback tokenizers; others join tokens in ways of their own, where an offset may be off by the
    spaces between words.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, *, skip_special_tokens: bool = True) -> None:
        """
        Args:
            start: characters before the first token.
        """
        self.length = start
        """Characters up to here; those of an unfinished character are not counted yet."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._held = b""
        self._broken = False

    def is_special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_token_ids

    def next(self, token_id: int, raw: bytes) -> int:
        """The offset of the text's next token, whose bytes are `raw`."""
        if not raw or (self._skip_special_tokens and self.is_special(token_id)):
            return self.length
        return self.shown(token_id, raw)

    def shown(self, token_id: int, raw: bytes) -> int:
        """As `next`, for a token that is in the text in any case."""
        if self._tokenizer.form != "byte_fallback":
            return self._byte_level(raw)
        if token_id in self._tokenizer.byte_token_ids:
            return self._single_byte(raw)
        offset = self.length + len(self._held)  # each byte of an unfinished character shows as one replacement
        self._held, self._broken = b"", False
        self.length = offset + len(raw.decode("utf-8", "replace"))
        return offset

    def _byte_level(self, raw: bytes) -> int:
        offset = self.length
        if self._held and codecs.utf_8_decode(self._held + raw[:1], "replace", False)[0].startswith("\ufffd"):
            offset += 1  # the character before was never finished: it shows as a replacement, and this token is new
        data = self._held + raw
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[used:]
        self.length += len(text)
        return offset

    def _single_byte(self, byte: bytes) -> int:
        offset, data = self.length, self._held + byte
        try:
            text, used = ("\ufffd", len(data)) if self._broken else codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            offset += len(self._held)
            text, used, self._broken = "\ufffd" * len(data), len(data), True
        self._held = data[used:]
        self.length += len(text)
        return offset


def prompt_offsets(tokenizer: Tokenizer, token_ids: list[int], text: str) -> list[int]:
    """Where the tokens of a prompt begin in its text.

    A special token counts where the text has it (a client wrote it), and not where the tokenizer put it in front; so
    does the space that a SentencePiece tokenizer prepends.
    """
    offsets = TextOffsets(tokenizer)
    found = []
    for token_id in token_ids:
        raw = tokenizer.token_bytes(token_id)
        there = offsets.length
        if raw.startswith(b" ") and there == 0 and not text.startswith(" "):
            raw = raw[1:]
        written = offsets.is_special(token_id) and text.startswith(raw.decode("utf-8", "replace"), there)
        offset = offsets.shown(token_id, raw) if raw and written else offsets.next(token_id, raw)
        found.append(min(offset, len(text)))
    return found
