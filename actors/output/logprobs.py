"""Log-probabilities from the worker's columns to what users read."""

from collections.abc import Iterator

from troupellm.actors.output.detokenizer import TextTables
from troupellm.protocol.messages.worker import RowLogprobs
from troupellm.protocol.params.outputs import TokenLogprob, TopLogprob


def token_logprobs(entry: RowLogprobs, tables: TextTables) -> Iterator[TokenLogprob]:
    """One per token of the entry, in order. The alternatives come in falling order, or as the request lists them, and
    without the token's own column."""
    width = entry.width
    ids = memoryview(entry.token_ids).cast("i")
    values = memoryview(entry.logprobs).cast("f")
    ranks = memoryview(entry.ranks).cast("i")
    others = memoryview(entry.other_ranks).cast("i")
    for index, rank in enumerate(ranks):
        start = index * width
        token_id = ids[start]
        token, raw = _text(token_id, tables)
        top = tuple(
            TopLogprob(
                ids[start + column],
                values[start + column],
                others[index * (width - 1) + column - 1] if others else column,
                *_text(ids[start + column], tables),
            )
            for column in range(1, width)
        )
        yield TokenLogprob(token_id, values[start], rank, token, raw, top)


def _text(token_id: int, tables: TextTables) -> tuple[str, bytes]:
    if token_id < len(tables.raw):
        return tables.alone[token_id], tables.raw[token_id]
    return "", b""
