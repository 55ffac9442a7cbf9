"""SentencePiece's own file, tokenizer.model, as a tokenizer of the library.

The file is one protobuf message (google/sentencepiece, src/sentencepiece_model.proto). Of its fields only those below
are read; its length and each length inside are checked before they are used.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from troupellm.models.tokenizer.gguf_word_models import SPACE, scored_merges, space_rules
from troupellm.models.tokenizer.tokenizer_bombs import check_charsmap
from troupellm.protocol.errors import ModelLoadError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
MOST_BYTES = 64 * 2**20
UNIGRAM, BPE = 1, 2
_FILE = "tokenizer.model"
_NEVER = -1e9
"""A score that no path through a text takes: the text `<0x0A>` is no newline."""


class Piece(NamedTuple):
    """One token."""

    text: str
    score: float
    kind: int


class SentencePieceModel(NamedTuple):
    """The contents of the file."""

    pieces: list[Piece]
    algorithm: int = UNIGRAM
    byte_fallback: bool = False
    unknown_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    """The normalization of characters, as the library reads it."""
    leading_space: bool = True
    merge_spaces: bool = True


def read_model(data: bytes) -> SentencePieceModel:
    """
    Raises:
        ModelLoadError: not such a file, or a damaged one.
    """
    if len(data) > MOST_BYTES:
        raise ModelLoadError(f"{_FILE} has {len(data)} bytes; at most {MOST_BYTES} are read")
    pieces: list[Piece] = []
    found: dict[str, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                pieces.append(_piece(_bytes(value)))
            elif field == 2:
                found |= _named(_bytes(value), _TRAINER)
            elif field == 3:
                found |= _named(_bytes(value), _NORMALIZER)
    except (ValueError, IndexError, struct.error) as error:
        raise ModelLoadError(f"{_FILE} is no SentencePiece model, or a damaged one: {error}") from error
    if not pieces or len({piece.text for piece in pieces}) != len(pieces):
        raise ModelLoadError(f"{_FILE} has {'a piece twice' if pieces else 'no pieces'}")
    model = SentencePieceModel(pieces, **found)
    check_charsmap(model.charsmap, _FILE)
    if model.algorithm not in (UNIGRAM, BPE):
        raise ModelLoadError(
            f"{_FILE}: model_type {model.algorithm} is not supported; 1 (unigram) and 2 (bpe) are read"
        )
    if not 0 <= model.unknown_id < len(pieces):
        raise ModelLoadError(f"{_FILE}: unk_id {model.unknown_id} is no piece; there are {len(pieces)}")
    return model


_TRAINER = {3: "algorithm", 35: "byte_fallback", 40: "unknown_id", 41: "bos_id", 42: "eos_id"}
_NORMALIZER = {2: "charsmap", 3: "leading_space", 4: "merge_spaces"}
_FLAGS = frozenset({"byte_fallback", "leading_space", "merge_spaces"})


def _named(data: bytes, names: dict[int, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in _fields(data):
        name = names.get(field)
        if name == "charsmap":
            found[name] = _bytes(value)
        elif name is not None:
            number = _signed(value)
            found[name] = bool(number) if name in _FLAGS else number
    return found


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for field, value in _fields(data):
        if field == 1:
            text = _bytes(value).decode()
        elif field == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif field == 3:
            kind = _signed(value)
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields; fixed-size values are bytes.

    Raises:
        ValueError: the message is cut off, or no message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field of wire type {wire} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number of more than 10 bytes at byte {at}")


def _signed(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes in place of a number")
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number in place of bytes")
    return value


def special_pieces(model: SentencePieceModel) -> list[AddedToken]:
    """Pieces that are found in the raw text: control pieces are special, user-defined ones are not."""
    return [
        AddedToken(piece.text, normalized=False, special=piece.kind == CONTROL)
        for piece in model.pieces
        if piece.kind in (CONTROL, USER_DEFINED) and piece.text
    ]


def build(model: SentencePieceModel, unknown: str | None) -> Tokenizer:
    """The tokenizer with the file's own normalization, without its special tokens.

    Args:
        unknown: the BPE's unknown token; None is none.
    """
    texts = [piece.text for piece in model.pieces]
    if model.algorithm == BPE:
        scores, kinds = [piece.score for piece in model.pieces], [piece.kind for piece in model.pieces]
        merges = scored_merges(texts, kinds, scores)
        ids = {text: index for index, text in enumerate(texts)}
        made = models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
        backend = Tokenizer(made)
    else:
        entries = [(piece.text, _NEVER if piece.kind == BYTE else piece.score) for piece in model.pieces]
        backend = Tokenizer(models.Unigram(entries, model.unknown_id, byte_fallback=model.byte_fallback))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    backend.normalizer = normalizers.Sequence(
        [*steps, *space_rules(merge=model.merge_spaces, lead=model.leading_space)]
    )
    strips = [decoders.Strip(" ", 1, 0)] if model.leading_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return backend
