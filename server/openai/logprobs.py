"""Log-probabilities in the three forms that the API has."""

from collections.abc import Sequence

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.api.chat import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
)
from troupellm.protocol.params.outputs import TokenLogprob
from troupellm.server.openai.text_offsets import TextOffsets, prompt_offsets


def chat_logprobs(entries: Sequence[TokenLogprob] | None, *, as_ids: bool = False) -> ChatLogprobs | None:
    """`as_ids`: tokens show as token_id:NUMBER."""
    if entries is None:
        return None
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                _as_id(entry.token_id) if as_ids else entry.token,
                entry.logprob,
                list(entry.raw),
                [
                    ChatTopLogprob(_as_id(top.token_id) if as_ids else top.token, top.logprob, list(top.raw))
                    for top in entry.top
                ],
            )
            for entry in entries
        ]
    )


def text_logprobs(
    entries: Sequence[TokenLogprob] | None, offsets: TextOffsets, *, as_ids: bool = False
) -> TextLogprobs | None:
    """The legacy form, for tokens that continue the text that `offsets` has followed so far."""
    if entries is None:
        return None
    return TextLogprobs(
        tokens=[token_name(entry.token_id, entry.raw, as_ids=as_ids) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[_alternatives(entry, as_ids=as_ids) for entry in entries],
        text_offset=[offsets.next(entry.token_id, entry.raw) for entry in entries],
    )


def echo_logprobs(
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    text: str,
    tokenizer: Tokenizer,
    *,
    as_ids: bool = False,
) -> TextLogprobs:
    """The legacy form for a prompt and its text; the very first token has no probability."""
    ids = list(token_ids[: len(entries)])
    return TextLogprobs(
        tokens=[token_name(token_id, tokenizer.token_bytes(token_id), as_ids=as_ids) for token_id in ids],
        token_logprobs=[None if entry is None else entry.logprob for entry in entries],
        top_logprobs=[None if entry is None else _alternatives(entry, as_ids=as_ids) for entry in entries],
        text_offset=prompt_offsets(tokenizer, ids, text),
    )


def token_name(token_id: int, raw: bytes, *, as_ids: bool = False) -> str:
    """A token's text; what has none is named by its bytes, or else its number, so that no two share a name."""
    if as_ids or not raw:
        return _as_id(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _alternatives(entry: TokenLogprob, *, as_ids: bool) -> dict[str, float]:
    """The top tokens by name, best first, and the token itself even when it is not among them.

    Where two tokens have one text all the same, the better one stays, but the token's own value always does.
    """
    table: dict[str, float] = {}
    for top in entry.top:
        table.setdefault(token_name(top.token_id, top.raw, as_ids=as_ids), top.logprob)
    table[token_name(entry.token_id, entry.raw, as_ids=as_ids)] = entry.logprob
    return table


def prompt_logprobs(entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """vLLM's extension: per prompt token a table from token id to its log-probability."""
    return [None if entry is None else _table(entry) for entry in entries]


def _table(entry: TokenLogprob) -> dict[int, PromptLogprob]:
    table = {top.token_id: PromptLogprob(top.logprob, top.rank, top.token) for top in entry.top}
    table[entry.token_id] = PromptLogprob(entry.logprob, entry.rank, entry.token)
    return table
