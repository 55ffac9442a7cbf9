import codecs
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from troupellm.actors.output.detokenizer import LibraryDecoder, SequenceText, TextTables
from troupellm.actors.output.stop_strings import StopStrings
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.tests.support.checkpoints import text_models


def _tables(write) -> TextTables:
    with tempfile.TemporaryDirectory() as folder:
        return TextTables(Tokenizer.load(write(Path(folder))))


BYTE_LEVEL = _tables(text_models.byte_level)
BYTE_FALLBACK = _tables(text_models.byte_fallback)
WORD_PIECE = _tables(text_models.word_piece)

CHUNKS = st.lists(st.integers(1, 5), min_size=1)


def run(text: SequenceText, token_ids: list[int], chunks: list[int]) -> tuple[str, str | None, int]:
    """Shown text, the stop string that was met, and how many tokens were used."""
    shown, used, position = "", 0, 0
    while position < len(token_ids):
        chunk = token_ids[position : position + chunks[position % len(chunks)]]
        position += len(chunk)
        piece, taken, stop = text.feed(chunk)
        shown, used = shown + piece, used + taken
        if stop is not None:
            return shown, stop, used
    piece, stop = text.finish()
    return shown + piece, stop, used


def ids_of(tables: TextTables):
    beyond = tables.tokenizer.size + 3
    texts = st.text(max_size=12).map(lambda text: tables.tokenizer.encode(text, add_special_tokens=False))
    return st.lists(st.one_of(st.integers(0, beyond).map(lambda i: [i]), texts), max_size=12).map(
        lambda parts: [token_id for part in parts for token_id in part]
    )


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The cut by reading one character at a time: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=150, deadline=None)
@given(ids_of(BYTE_LEVEL), CHUNKS, st.booleans())
def test_byte_level_deltas_add_up_to_the_full_decode(token_ids, chunks, skip):
    text = SequenceText(BYTE_LEVEL.decoder(skip_special_tokens=skip), None)
    shown, _, _ = run(text, token_ids, chunks)
    assert shown == BYTE_LEVEL.tokenizer.decode(token_ids, skip_special_tokens=skip)


def _mistake_behind_a_character(token_ids: list[int], skip: bool) -> bool:
    """Whether a run of byte tokens has whole characters before its first mistake: the library takes those back."""
    tokenizer = BYTE_FALLBACK.tokenizer
    ignored = {i for i in token_ids if i >= tokenizer.size or (skip and i in tokenizer.special_token_ids)}
    runs: list[bytes] = [b""]
    for token_id in token_ids:
        if token_id in tokenizer.byte_token_ids:
            runs[-1] += tokenizer.token_bytes(token_id)
        elif token_id not in ignored:
            runs.append(b"")
    for one in runs:
        try:
            one.decode()
        except UnicodeDecodeError as error:
            if error.start > 0:
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(ids_of(BYTE_FALLBACK), CHUNKS, st.booleans())
def test_byte_fallback_deltas_continue_a_prompt_like_the_full_decode(token_ids, chunks, skip):
    if _mistake_behind_a_character(token_ids, skip):
        return
    tokenizer = BYTE_FALLBACK.tokenizer
    prompt = tokenizer.encode("the", add_special_tokens=False)
    text = SequenceText(BYTE_FALLBACK.decoder(skip_special_tokens=skip), None)
    shown, _, _ = run(text, token_ids, chunks)
    assert "the" + shown == tokenizer.decode([*prompt, *token_ids], skip_special_tokens=skip)


def test_byte_fallback_shows_whole_characters_before_a_mistake():
    tokenizer = BYTE_FALLBACK.tokenizer
    first = next(i for i in tokenizer.byte_token_ids if tokenizer.token_bytes(i) == b"\x00")
    text = SequenceText(BYTE_FALLBACK.decoder(skip_special_tokens=True), None)
    shown = [text.feed((first + byte,))[0] for byte in (0x0A, 0xC3, 0xA9, 0xFF, 0x41)]
    assert shown == ["\n", "", "é", "\ufffd", "\ufffd"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=12), CHUNKS)
def test_tokenizers_of_other_forms_are_decoded_by_the_library(token_ids, chunks):
    assert isinstance(WORD_PIECE.decoder(skip_special_tokens=True), LibraryDecoder)
    text = SequenceText(WORD_PIECE.decoder(skip_special_tokens=True), None)
    shown, _, _ = run(text, token_ids, chunks)
    assert shown == WORD_PIECE.tokenizer.decode(token_ids)


@pytest.mark.parametrize(("spaces", "wanted"), [(True, "the [UNK] [UNK] foxes"), (False, "the [UNK][UNK] foxes")])
def test_special_tokens_in_a_row_stand_with_or_without_spaces(spaces, wanted):
    for chunks in ([5], [1] * 5, [2, 3]):
        text = SequenceText(WORD_PIECE.decoder(skip_special_tokens=False, spaces=spaces), None)
        assert run(text, [1, 0, 0, 2, 3], chunks)[0] == wanted


def test_tables_that_disagree_with_the_library_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, token_id: b"x")
    tables = TextTables(Tokenizer.load(text_models.byte_level(tmp_path)))
    assert not tables.trusted
    assert isinstance(tables.decoder(skip_special_tokens=True), LibraryDecoder)
    assert tables.pieces(skip_special_tokens=True) == []


@pytest.mark.parametrize("tables", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
def test_part_of_a_character_is_held_back(tables):
    token_ids = [next(i for i, raw in enumerate(tables.raw) if raw == bytes([byte])) for byte in "🎉".encode()]
    text = SequenceText(tables.decoder(skip_special_tokens=True), None)
    assert [text.feed((token_id,))[0] for token_id in token_ids] == ["", "", "", "🎉"]
    assert text.feed(token_ids) == ("🎉", 4, None)
    text.feed(token_ids[:2])
    assert text.finish()[0].strip("\ufffd") == ""


def test_every_byte_value_is_in_the_table():
    singles = {raw for raw in BYTE_LEVEL.raw if len(raw) == 1}
    assert len(singles) == 256


STOPS = st.lists(st.text("abt hesé🎉", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.text("abt hesé🎉", max_size=30), STOPS, CHUNKS, st.booleans())
def test_stop_strings_cut_like_the_naive_search(full, stops, chunks, include):
    token_ids = BYTE_LEVEL.tokenizer.encode(full, add_special_tokens=False)
    decoder = BYTE_LEVEL.decoder(skip_special_tokens=True)
    shown, stop, used = run(SequenceText(decoder, StopStrings(stops), include_stop=include), token_ids, chunks)
    expected, met = naive_cut(full, stops)
    assert stop == met
    assert shown == expected + (met or "" if include else "")
    if not include:
        assert not any(text in shown for text in stops)
    if met is not None:  # tokens behind the one that completes the stop string are not used
        before = BYTE_LEVEL.raw
        data = b"".join(before[i] for i in token_ids[: used - 1])
        assert naive_cut(codecs.utf_8_decode(data, "replace", False)[0], stops)[1] is None


@settings(max_examples=100, deadline=None)
@given(ids_of(BYTE_LEVEL), STOPS, CHUNKS)
def test_no_stop_string_is_ever_shown_whatever_the_tokens(token_ids, stops, chunks):
    text = SequenceText(BYTE_LEVEL.decoder(skip_special_tokens=False), StopStrings(stops))
    shown, _, _ = run(text, token_ids, chunks)
    assert shown == naive_cut(BYTE_LEVEL.tokenizer.decode(token_ids, skip_special_tokens=False), stops)[0]


def test_the_possible_beginning_of_a_stop_string_is_held_until_it_is_certain():
    encode = BYTE_LEVEL.tokenizer.encode
    text = SequenceText(BYTE_LEVEL.decoder(skip_special_tokens=True), StopStrings(["QQQX"]))
    assert text.feed(encode("zQQ", add_special_tokens=False))[0] == "z"
    assert text.feed(encode("QQ", add_special_tokens=False))[0] == "Q"
    assert text.feed(encode("-", add_special_tokens=False))[0] == "QQQ-"


def test_stop_strings_do_not_count_before_min_tokens():
    encode = BYTE_LEVEL.tokenizer.encode
    token_ids = [token_id for part in "Q.Q." for token_id in encode(part, add_special_tokens=False)]
    text = SequenceText(BYTE_LEVEL.decoder(skip_special_tokens=True), StopStrings(["Q"]), min_tokens=1)
    assert run(text, token_ids, [1]) == ("Q.", "Q", 3)


def test_a_long_wait_for_a_stop_string_costs_linear_work(monkeypatch):
    stops = StopStrings(["a" * 511 + "b"])
    text = SequenceText(BYTE_LEVEL.decoder(skip_special_tokens=True), stops)
    token_id = BYTE_LEVEL.tokenizer.encode("a", add_special_tokens=False)
    scanned = []
    original = StopStrings.scan

    def counting(self, state, piece):
        scanned.append(len(piece))
        return original(self, state, piece)

    monkeypatch.setattr(StopStrings, "scan", counting)
    shown, _, _ = run(text, token_id * 3000, [1])
    assert shown == "a" * 3000
    assert sum(scanned) == 3000
