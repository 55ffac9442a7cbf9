"""Matchers, masks and the sleep before a mark: what may come next, and what is taken back."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from troupellm.models.batch.row_drafts import RowDrafts
from troupellm.models.structured_outputs.after_thinking import Mark, Sleep, allows
from troupellm.models.structured_outputs.backend import GuideError, Matcher
from troupellm.models.structured_outputs.backends import (
    check_start,
    make_backend,
    mask_words,
    masked_tokens,
    program_text,
)
from troupellm.models.structured_outputs.guided_rows import GuidedRows
from troupellm.models.structured_outputs.matcher_cache import GuideLibrary
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import EarlyEnd, GuideProgram, GuideSpec
from troupellm.tests.support.checkpoints import text_models
from troupellm.tests.support.guides.guide_crowd import VOCAB, Crowd

EARLY = EarlyEnd(
    token="<|im_end|>", starts=("<s>",), opens="<m>", ends=("<e>", "<|im_end|>"), recipient="to=functions."
)


def program(kind: str, source: str, after: str = "", special: dict[str, int] | None = None) -> GuideProgram:
    text = program_text(GuideSpec(kind=kind, source=source), "llguidance", 64, special or {})
    return GuideProgram(backend="llguidance", text=text, after=after)


def allowed(library: GuideLibrary, matcher: Matcher) -> list[int]:
    masks = np.zeros((1, library.mask_words), dtype=np.int32)
    library.backend("llguidance").fill([matcher], masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()


def how_many(mask: np.ndarray) -> int:
    """Tokens that it allows."""
    return int.from_bytes(mask.tobytes(), "little").bit_count()


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> set[bytes]:
    return {tokenizer.token_bytes(token) for token in tokens}


def test_only_tokens_that_begin_a_choice_are_allowed(library, tokenizer):
    matcher = library.matcher(program("choice", '["yes", "no"]'))
    assert pieces(tokenizer, allowed(library, matcher)) <= {b"y", b"ye", b"yes", b"n", b"no"}
    assert matcher.accept(tokenizer.encode("no", add_special_tokens=False))
    assert matcher.stopped
    assert matcher.accepting


def test_an_end_may_come_where_the_text_is_complete(library, tokenizer):
    matcher = library.matcher(program("regex", "a+"))
    assert not tokenizer.eos_token_ids & set(allowed(library, matcher))
    matcher.accept(tokenizer.encode("a", add_special_tokens=False))
    assert tokenizer.eos_token_ids <= set(allowed(library, matcher))
    assert not matcher.stopped
    assert matcher.accept([min(tokenizer.eos_token_ids)])
    assert matcher.stopped


def test_what_does_not_fit_is_an_error_and_stays_one(library, tokenizer):
    matcher = library.matcher(program("regex", "a+"))
    assert not matcher.accept(tokenizer.encode("b", add_special_tokens=False))
    assert matcher.error is not None
    assert "<" not in matcher.error


def test_copies_go_their_own_ways(library, tokenizer):
    first = library.matcher(program("regex", "ab|cd"))
    second = first.copy()
    first.accept(tokenizer.encode("a", add_special_tokens=False))
    assert pieces(tokenizer, allowed(library, first)) == {b"b"}
    assert b"c" in pieces(tokenizer, allowed(library, second))


def test_tokens_are_taken_back(library, tokenizer):
    matcher = library.matcher(program("json_schema", '{"type": "array", "items": {"type": "integer"}}'))
    before = allowed(library, matcher)
    ids = tokenizer.encode("[1, 22, 333]", add_special_tokens=False)
    masks = []
    for token in ids:
        assert matcher.accept([token])
        masks.append(None if matcher.stopped else allowed(library, matcher))
    for count in range(1, len(ids)):
        matcher.rollback(1)
        assert allowed(library, matcher) == masks[len(ids) - count - 1]
    matcher.rollback(1)
    assert allowed(library, matcher) == before


def test_many_masks_on_many_threads_are_those_of_one(library, tokenizer):
    backend = library.backend("llguidance")
    texts = [f"{'ab' * number}c" for number in range(1, 40)]
    matchers = [library.matcher(program("choice", json.dumps([text]))) for text in texts]
    together = np.zeros((len(matchers), library.mask_words), dtype=np.int32)
    backend.fill(matchers, together)
    for index, matcher in enumerate(matchers):
        alone = np.zeros((1, library.mask_words), dtype=np.int32)
        backend.fill([matcher], alone)
        assert (together[index] == alone[0]).all()


@pytest.mark.parametrize("write", [text_models.byte_level, text_models.byte_fallback])
def test_models_without_an_end_token_and_other_vocabularies(tmp_path: Path, write):
    write(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.eos_token_ids = frozenset()
    width = tokenizer.size + 7
    backend = make_backend("llguidance", tokenizer, width)
    words = mask_words(tokenizer, width)
    matcher = backend.compile(program("regex", "a+").text)
    check_start(backend, matcher, words)
    a = next(token for token in range(tokenizer.size) if tokenizer.token_bytes(token) == b"a")
    assert matcher.accept([a])
    masks = np.zeros((1, words), dtype=np.int32)
    backend.fill([matcher], masks)
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    assert bits[a]
    assert bits[masked_tokens(tokenizer, width) - 1]  # the end, which no logit stands for
    assert not bits[tokenizer.size : width].any()


def test_the_library_keeps_what_it_built_within_bounds(tokenizer, monkeypatch):
    monkeypatch.setattr("troupellm.models.structured_outputs.matcher_cache.MOST_PROGRAMS", 3)
    library = GuideLibrary(lambda: tokenizer, VOCAB, 1)
    for number in range(5):
        library.matcher(program("regex", f"a{{{number}}}b"))
    assert library.num_built == 3


def test_a_program_that_cannot_be_built_fails_its_row_alone(library, tokenizer, helper):
    crowd = Crowd(library, tokenizer, helper)
    crowd.add(1, GuideProgram(backend="llguidance", text="start: nothing"))
    crowd.add(2, program("choice", '["yes"]'))
    crowd.run(20)
    assert crowd.finished == {2: "yes"}
    assert crowd.errors[1].startswith("structured_outputs: the guide of this output cannot go on: ")


def test_a_tokenizer_that_cannot_be_read_fails_the_row(helper, tokenizer):
    def broken() -> Tokenizer:
        raise OSError("no file at /secret/place")

    library = GuideLibrary(broken, VOCAB, 1)
    with pytest.raises(GuideError) as failed:
        library.matcher(program("regex", "a"))
    assert "secret" not in str(failed.value)
    assert tokenizer.size


class TestSleep:
    MARK = "</think>"

    @pytest.fixture
    def mark(self, tokenizer) -> Mark:
        return Mark(self.MARK, tokenizer, VOCAB)

    def test_a_guide_wakes_at_its_mark_however_the_mark_is_cut(self, mark, tokenizer):
        single = [
            next(token for token in range(VOCAB) if tokenizer.token_bytes(token) == bytes([byte]))
            for byte in b"I think < so </th</think>"
        ]
        for ids in (single, tokenizer.encode("I think so</think>", add_special_tokens=False)):
            sleep = Sleep(mark)
            assert sleep.accept([*ids, 5, 6]) == len(ids)
            assert sleep.awake

    @pytest.mark.parametrize(("early_end", "called"), [(None, False), (EARLY, False), (EARLY, True)])
    def test_nothing_else_may_end_it_and_nothing_may_run_past_the_mark(self, early_end, called, library, tokenizer):
        mark = library.mark(GuideProgram(backend="llguidance", text="", after=self.MARK, early_end=early_end))
        ends = tokenizer.eos_token_ids - ({tokenizer.added_tokens[EARLY.token]} if called else set())
        assert len(ends) == len(tokenizer.eos_token_ids) - called
        text = self.MARK.encode()
        for known in range(len(text)):
            bits = np.unpackbits(mark.mask(known, called=called).view(np.uint8), bitorder="little")
            for token in range(VOCAB):
                whole = text[:known] + tokenizer.token_bytes(token)
                beyond = text in whole and not whole.endswith(text)
                assert bool(bits[token]) == (token not in ends and not beyond)

    def test_only_an_open_call_may_end_it_and_drafts_that_opened_one_are_taken_back(self, library, tokenizer):
        sleep = Sleep(library.mark(GuideProgram(backend="llguidance", text="", after=self.MARK, early_end=EARLY)))
        end = tokenizer.added_tokens[EARLY.token]

        def accept(text: str) -> int:
            ids = tokenizer.encode(text, add_special_tokens=False)
            return sleep.accept(ids)

        accept("thoughts<m>So.")
        assert not allows(sleep.mask, end)
        accept("<e><s>to=functions.now")
        assert not allows(sleep.mask, end)
        drafts = accept("<m>{}")
        assert allows(sleep.mask, end)
        sleep.rollback(drafts)
        assert not allows(sleep.mask, end)
        accept("<m>{}")
        assert allows(sleep.mask, end)

    def test_behind_the_name_in_a_header_nothing_but_its_end_may_come(self, tokenizer):
        """gpt-oss goes on with ` <|constrain|>json<|message|>` where it may."""
        end = tokenizer.added_tokens["<tool_call>"]
        sleep = Sleep(Mark("<|im_start|>final<tool_call>", tokenizer, VOCAB))
        for token in tokenizer.encode("<|im_start|>final", add_special_tokens=False):
            assert allows(sleep.mask, end)
            assert allows(sleep.mask, 5)
            sleep.accept([token])
        assert [token for token in range(VOCAB) if allows(sleep.mask, token)] == [end]
        sleep.accept([end])
        assert sleep.awake

    def test_drafts_are_taken_back_beyond_the_mark(self, library, helper, tokenizer):
        rows = GuidedRows(library, helper)
        ids = tokenizer.encode("So</think>", add_special_tokens=False)
        state = SamplingState(guide=program("regex", "ab+", after=self.MARK))
        rows.add(1, state, ids)
        a, b = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")

        awake = rows.filled(rows.begin([1])).bits.numpy().copy()
        others = GuidedRows(library, helper)
        others.add(1, state, ids[:-1])
        others.filled(others.begin([1]))  # until it is built nothing is drafted for it
        drafts = RowDrafts([ids[-1], a, b, a, b])
        others.trim(1, drafts)
        assert drafts.tokens == [ids[-1], a, b]
        masks = others.filled(others.begin([1] * 4, {1: drafts})).bits.numpy()
        assert how_many(masks[0]) > how_many(awake[0])
        assert (masks[1] == awake[0]).all()
        others.advance([1], [[ids[-1], a]], [100])
        assert (others.filled(others.begin([1])).bits.numpy()[0] == masks[2]).all()

    def test_a_tree_of_drafts_is_followed_branch_by_branch(self, library, helper, tokenizer):
        a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
        rows = GuidedRows(library, helper)
        rows.add(1, SamplingState(guide=program("regex", "(ab|ba)(c|a)")), [])
        rows.filled(rows.begin([1]))
        drafts = RowDrafts([a, b, c, b, a, c, a, c], [-1, -1, -1, 0, 1, 3, 4, 4])
        rows.trim(1, drafts)
        assert drafts.tokens == [a, b, b, a, c, a, c]
        assert drafts.parents == [-1, -1, 0, 1, 2, 3, 3]
        masks = rows.filled(rows.begin([1] * 8, {1: drafts})).bits.numpy()
        for node in range(7):
            alone = GuidedRows(library, helper)
            path = [drafts.tokens[index] for index in drafts.ancestors(node)]
            alone.add(1, SamplingState(guide=program("regex", "(ab|ba)(c|a)")), path)
            assert (masks[node + 1] == alone.filled(alone.begin([1])).bits.numpy()[0]).all()
        advanced = rows.advance([1], [[a, b, c, a]], [100])
        assert advanced.kept == {1: 3}
        assert list(advanced.finished) == [1]


S = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
A = {"type": "tag", "begin": "<f=a>", "content": {"type": "json_schema", "json_schema": S}, "end": "</f>"}
B = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[a-z/]{2,4}"}, "end": ["</f>", "!"]}
JSON = r'\{\s*"x"\s*:\s*-?\d+\s*\}'
CALL_A, CALL_B = rf"<f=a>\s*{JSON}\s*</f>", r"<f=b>[a-z/]{2,4}(</f>|!)"
TAGS = [
    ({"type": "const_string", "value": "hi"}, "hi"),
    ({"type": "json_schema", "json_schema": S}, rf"\s*{JSON}\s*"),
    ({"type": "regex", "pattern": "a/b{1,3}"}, "a/b{1,3}"),
    ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, "x|y"),
    ({"type": "sequence", "elements": [{"type": "const_string", "value": "<a>"}, {"type": "any_text"},
                                       {"type": "const_string", "value": "]"}, A]}, rf"(?s:<a>.*?\]){CALL_A}"),
    ({"type": "or", "elements": [A, B]}, f"{CALL_A}|{CALL_B}"),
    (A, CALL_A),
    ({"type": "tags_with_separator", "tags": [A, B], "separator": ",", "at_least_one": True},
     rf"({CALL_A}|{CALL_B})(,({CALL_A}|{CALL_B}))*"),
    ({"type": "tags_with_separator", "tags": [B], "separator": ",", "stop_after_first": True}, f"({CALL_B})?"),
    ({"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B], "at_least_one": True, "stop_after_first": True},
     f"{CALL_A}|{CALL_B}"),
    ({"type": "tag", "begin": "<function=f>", "content": {"type": "qwen_xml_parameter", "json_schema": {
        "properties": {"n": {"type": "integer"}, "u": {"type": "string", "enum": ["c", "f"]}}, "required": ["n"]}},
      "end": "</function>"},
     r"<function=f>\n?<parameter=n>\s*-?\d+\s*</parameter>\n?(<parameter=u>\n[cf]\n</parameter>\n?)?</function>"),
]  # fmt: skip


@pytest.mark.parametrize(("tag", "pattern"), TAGS)
def test_texts_follow_their_structural_tag(library, tokenizer, helper, tag, pattern):
    wanted = program("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    crowd = Crowd(library, tokenizer, helper)
    for row in range(6):
        crowd.add(row, wanted)
    crowd.run(400)
    assert not crowd.errors
    assert all(re.fullmatch(pattern, text) for text in crowd.finished.values()), crowd.finished
    assert len(crowd.finished) >= 1


def test_triggers_in_free_text(library, tokenizer):
    """Text is free until a trigger, then the tag must follow; the old form says the same."""
    new = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [A, B]}}
    old = {"structures": [{"begin": "<f=a>", "schema": S, "end": "</f>"}], "triggers": ["<f="]}
    for tag in (new, old):
        made = program("structural_tag", json.dumps({"type": "structural_tag", **tag}))
        for text in ("just text", 'some <f=a>{"x": 1}</f> more', '<f=a>{"x":1}</f><f=a>{"x":2}</f>'):
            matcher = library.matcher(made)
            assert matcher.accept(tokenizer.encode(text, add_special_tokens=False)), text
            assert matcher.accepting, text
        for text in ("some <f=c>", "<f=a>{}</f>", '<f=a>{"x": "1"}'):
            assert not library.matcher(made).accept(tokenizer.encode(text, add_special_tokens=False)), text


@pytest.mark.parametrize("pattern", [" ", "[ ]?", r"\s*", r"[\n\t ]{0,3}", r"(?:\r?\n|[\s])*", "( |\t)+"])
def test_patterns_of_white_space(library, tokenizer, pattern):
    spec = GuideSpec(kind="json_schema", source='{"type": "array"}', whitespace_pattern=pattern)
    text = program_text(spec, "llguidance", 64, {})
    assert library.matcher(GuideProgram(backend="llguidance", text=text)).accept(
        tokenizer.encode("[", add_special_tokens=False)
    )


@pytest.mark.parametrize("pattern", ["[a-z]*", "[*]", ".", "x?", "[ -a]", r"[^\S]", r"\w", "[ ]|,", r"\x21", " {"])
def test_patterns_of_more_than_white_space_are_refused(pattern):
    spec = GuideSpec(kind="json_schema", source='{"type": "array"}', whitespace_pattern=pattern)
    with pytest.raises(GuideError, match="whitespace_pattern must match nothing but white space"):
        program_text(spec, "llguidance", 64, {})


def test_one_of_ten_thousand_choices_is_made(library, tokenizer, helper):
    choices = [f"item-{number:05d}" for number in range(10_000)]
    crowd = Crowd(library, tokenizer, helper)
    for row in range(4):
        crowd.add(row, program("choice", json.dumps(choices)))
    crowd.run(20)
    assert len(crowd.finished) == 4
    assert set(crowd.finished.values()) <= set(choices)


def test_rows_that_are_dropped_are_forgotten(library, tokenizer):
    with ThreadPoolExecutor(1) as pool:
        rows = GuidedRows(library, pool)
        rows.add(1, SamplingState(guide=program("regex", "a")), [])
        rows.drop(1)
        rows.drop(1)
        assert len(rows) == 0
        assert rows.begin([1]) is None
