"""Counts the tokens of an answer that are reasoning, by the ids of their marks if these are single tokens."""

from collections.abc import Sequence

from troupellm.models.chat_parsers.syntax import ChatSyntax
from troupellm.models.tokenizer.tokenizer import Tokenizer


class ReasoningCount:
    """Follows the tokens of one choice."""

    def __init__(self, marks: "ReasoningMarks", *, inside: bool) -> None:
        self._marks = marks
        self._inside = inside
        self.tokens = 0

    def add(self, token_ids: Sequence[int], reasoning: str) -> None:
        """
        Args:
            token_ids: new ones.
            reasoning: the new text that was a thought; counted where marks are no single tokens.
        """
        marks = self._marks
        if marks.open_id is None or marks.close_id is None:
            if reasoning:
                self.tokens += min(len(token_ids), marks.length(reasoning)) if token_ids else 0
            return
        for token_id in token_ids:
            if token_id == marks.open_id:
                self._inside = True
            elif token_id == marks.close_id:
                self._inside = False
            elif self._inside:
                self.tokens += 1


class ReasoningMarks:
    """The first marks of a chat syntax's reasoning, as texts and where possible as token ids."""

    def __init__(self, opens: str, closes: str, *, always: bool, by_id: bool, tokenizer: Tokenizer) -> None:
        self.opens = opens
        self.closes = closes
        self.always = always
        """Answers begin with reasoning."""
        self._tokenizer = tokenizer
        self.open_id = _single(tokenizer, opens) if by_id else None
        self.close_id = _single(tokenizer, closes) if by_id else None

    @classmethod
    def of(cls, chat_syntax: ChatSyntax, tokenizer: Tokenizer) -> "ReasoningMarks | None":
        thinking, channels = chat_syntax.thinking, chat_syntax.channels
        if channels is not None:
            opens = f"{channels.channel}{channels.reasoning[0]}{channels.message}"
            return cls(opens, channels.ends[0], always=False, by_id=False, tokenizer=tokenizer)
        if thinking is None:
            return None
        always = thinking.begins == "always"
        single = len(thinking.opens) == 1
        return cls(thinking.opens[0], thinking.closes[0], always=always, by_id=single, tokenizer=tokenizer)

    def count(self, *, inside: bool) -> ReasoningCount:
        return ReasoningCount(self, inside=inside)

    def length(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))


def _single(tokenizer: Tokenizer, mark: str) -> int | None:
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return ids[0] if len(ids) == 1 and tokenizer.token_bytes(ids[0]) == mark.encode() else None
