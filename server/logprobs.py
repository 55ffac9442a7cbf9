"""Log-probabilities in the three forms that the API has."""

from collections.abc import Sequence

from troupellm.protocol.openai import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
)
from troupellm.protocol.outputs import TokenLogprob


def chat_logprobs(entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    if entries is None:
        return None
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                entry.token,
                entry.logprob,
                list(entry.raw),
                [ChatTopLogprob(top.token, top.logprob, list(top.raw)) for top in entry.top],
            )
            for entry in entries
        ]
    )


def text_logprobs(entries: Sequence[TokenLogprob | None] | None, offset: int, first: str = "") -> TextLogprobs | None:
    """The legacy form.

    Args:
        entries: None stands for the very first token of an echoed prompt, which has no probability.
        offset: characters of the choice's text before the first entry.
        first: text of the token whose entry is None.
    """
    if entries is None:
        return None
    tokens = [first if entry is None else entry.token for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return TextLogprobs(
        tokens=tokens,
        token_logprobs=[None if entry is None else entry.logprob for entry in entries],
        top_logprobs=[None if entry is None else _alternatives(entry) for entry in entries],
        text_offset=offsets,
    )


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    """The top tokens by their text, and the token itself even when it is not among them."""
    return {entry.token: entry.logprob} | {top.token: top.logprob for top in entry.top}


def text_length(logprobs: TextLogprobs | None) -> int:
    """Characters that the described tokens cover."""
    return sum(map(len, logprobs.tokens)) if logprobs is not None else 0


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """vLLM's extension: per prompt token a table from token id to its log-probability."""
    return [None if entry is None else _table(entry) for entry in entries]


def _table(entry: TokenLogprob) -> dict[int, PromptLogprob]:
    table = {top.token_id: PromptLogprob(top.logprob, top.rank, top.token) for top in entry.top}
    table[entry.token_id] = PromptLogprob(entry.logprob, entry.rank, entry.token)
    return table
