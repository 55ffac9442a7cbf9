"""The oracle's next tokens, and beam search over it, written down the plain way."""

import struct
import zlib
from collections.abc import Callable

VOCAB = 50


def next_token(tokens: list[int], fork: int) -> int:
    return zlib.crc32(struct.pack(f"<{len(tokens)}i", *tokens), fork) % VOCAB


def candidates(tokens: list[int]) -> list[tuple[float, int]]:
    """(log-probability, token) of everything that may come next, likeliest first."""
    length = len(tokens)
    heights = [zlib.crc32(struct.pack(f"<{length}i", *tokens), token + 1) / 2**32 for token in range(VOCAB)]
    return sorted(
        ((struct.unpack("<f", struct.pack("<f", height * 6 - 7))[0], token) for token, height in enumerate(heights)),
        reverse=True,
    )


def beams_of(
    prompt: list[int],
    width: int,
    max_tokens: int,
    stops: frozenset[int],
    length_penalty: float = 1.0,
    early_stopping: bool = False,
    candidates: Callable[[list[int]], list[tuple[float, int]]] = candidates,
) -> list[list[int]]:
    """The generated tokens of each answer of a beam search, best first, written down the plain way.

    With early stopping it ends once as many sequences are complete as there are beams. Those that reach the limit in
    the same step are complete too and compete with them, as in transformers and in the vLLM that had the field.
    """

    def score(beam: tuple[float, list[int]]) -> float:
        cumulative, tokens = beam
        return cumulative / (len(tokens) - (tokens[-1] in stops)) ** length_penalty

    beams, complete = [(0.0, prompt)], []
    for step in range(1, max_tokens + 1):
        following = []
        for cumulative, tokens in beams:
            for logprob, token in candidates(tokens)[: max(2 * width, width + len(stops))]:
                (complete if token in stops else following).append((cumulative + logprob, [*tokens, token]))
        beams = sorted(following, key=lambda beam: -beam[0])[:width]
        if early_stopping and len(complete) >= width and step < max_tokens:
            beams = []
            break
    best = sorted([*complete, *beams], key=score, reverse=True)[:width]
    return [tokens[len(prompt) :] for _, tokens in best]


def vector_of(tokens: list[int]) -> bytes:
    """The pooled vector: one number."""
    return struct.pack("<f", next_token(tokens, 0) / VOCAB)
