"""Log-probabilities of the completions API: names of tokens, and where they begin in the text."""

import pytest

from troupellm.actors.output.detokenizer import TextTables
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.outputs import TokenLogprob, TopLogprob
from troupellm.server.openai.logprobs import echo_logprobs, text_logprobs, token_name
from troupellm.server.openai.text_offsets import TextOffsets, prompt_offsets
from troupellm.tests.support.checkpoints.text_models import byte_fallback, byte_level


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("byte") / "level"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(byte_fallback(tmp_path_factory.mktemp("byte") / "fallback"))


def entry(tokenizer: Tokenizer, token_id: int, logprob: float, *top: tuple[int, float]) -> TokenLogprob:
    raw = tokenizer.token_bytes(token_id)
    others = tuple(
        TopLogprob(other, value, rank, "?", tokenizer.token_bytes(other)) for rank, (other, value) in enumerate(top)
    )
    return TokenLogprob(token_id, logprob, 0, "?", raw, others)


def single_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """A token per byte, for all merges."""
    byte_ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.size))}
    if tokenizer.byte_token_ids:
        byte_ids = {tokenizer.token_bytes(i): i for i in tokenizer.byte_token_ids}
    return [byte_ids[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b" the", " the"),
        (b"\xe4\xb8", "bytes:\\xe4\\xb8"),
        (b"a\xff", "bytes:\\x61\\xff"),
        (b"", "token_id:7"),
        ("\ufffd".encode(), "\ufffd"),
    ],
)
def test_tokens_are_named_by_text_or_else_by_bytes(raw, name):
    assert token_name(7, raw) == name


def test_tokens_that_are_parts_of_characters_do_not_collide(byte_tokens):
    one, two, three = single_bytes(byte_tokens, b"\xe4\xb8\xad")
    beyond = byte_tokens.size
    top = ((one, -0.1), (two, -0.2), (beyond, -0.3), (beyond + 1, -0.4))
    table = text_logprobs([entry(byte_tokens, three, -0.5, *top)], TextOffsets(byte_tokens)).top_logprobs[0]
    assert table == {
        "bytes:\\xe4": -0.1,
        "bytes:\\xb8": -0.2,
        f"token_id:{beyond}": -0.3,
        f"token_id:{beyond + 1}": -0.4,
        "bytes:\\xad": -0.5,
    }


def test_a_tokens_own_value_wins_over_another_token_of_the_same_text(pieces):
    whole = next(i for i in range(pieces.size) if pieces.token_bytes(i) == b"a" and i not in pieces.byte_token_ids)
    (lone,) = single_bytes(pieces, b"a")
    table = text_logprobs([entry(pieces, lone, -3.0, (whole, -0.5))], TextOffsets(pieces)).top_logprobs[0]
    assert table == {"a": -3.0}
    (plain,) = single_bytes(pieces, b"b")
    twice = entry(pieces, plain, -4.0, (whole, -0.5), (lone, -3.0))
    assert text_logprobs([twice], TextOffsets(pieces)).top_logprobs[0] == {"a": -0.5, "b": -4.0}


def test_tokens_of_a_split_character_share_its_offset(byte_tokens):
    ids = single_bytes(byte_tokens, "a日b".encode())
    offsets = TextOffsets(byte_tokens, 10)
    assert [offsets.next(i, byte_tokens.token_bytes(i)) for i in ids] == [10, 11, 11, 11, 12]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xe4a", [0, 1]),
        (b"\xe4\xe4\xb8\xada", [0, 1, 1, 1, 2]),
        (b"\xff\xffa", [0, 1, 2]),
        (b"\xe0\x80a", [0, 1, 2]),
    ],
)
def test_bytes_that_never_become_a_character_are_one_each(byte_tokens, data, expected):
    offsets = TextOffsets(byte_tokens)
    ids = single_bytes(byte_tokens, data)
    assert [offsets.next(i, byte_tokens.token_bytes(i)) for i in ids] == expected
    assert len(byte_tokens.decode(ids)) == offsets.length


@pytest.mark.parametrize("form", ["byte_tokens", "pieces"])
@pytest.mark.parametrize("skip", [True, False])
def test_the_length_is_that_of_the_shown_text_for_any_tokens(form, skip, request):
    """Over every token of the vocabulary in a scrambled order, against the detokenizer itself."""
    tokenizer: Tokenizer = request.getfixturevalue(form)
    decoder = TextTables(tokenizer).decoder(skip_special_tokens=skip)
    offsets = TextOffsets(tokenizer, skip_special_tokens=skip)
    shown, last = "", 0
    for step in range(3 * tokenizer.size):
        token_id = step * 7919 % tokenizer.size
        shown += decoder.step(token_id)
        offset = offsets.next(token_id, tokenizer.token_bytes(token_id))
        assert last <= offset <= offsets.length
        assert offsets.length == len(shown)
        last = offset


def test_special_tokens_that_are_not_shown_have_no_length(byte_tokens):
    (special, *_) = sorted(byte_tokens.special_token_ids)
    ids = [*single_bytes(byte_tokens, b"a"), special, *single_bytes(byte_tokens, b"b")]
    hidden, shown = TextOffsets(byte_tokens), TextOffsets(byte_tokens, skip_special_tokens=False)
    assert [hidden.next(i, byte_tokens.token_bytes(i)) for i in ids] == [0, 1, 1]
    assert [shown.next(i, byte_tokens.token_bytes(i)) for i in ids] == [0, 1, 1 + len("<|end|>")]


def test_an_echoed_prompt_counts_neither_bos_nor_the_prepended_space(pieces):
    text = "the thé"
    ids = pieces.encode(text, add_special_tokens=True)
    assert ids[0] == 1
    offsets = prompt_offsets(pieces, ids, text)
    assert offsets[:2] == [0, 0]
    for token_id, offset in zip(ids[2:], offsets[2:], strict=True):
        assert text[offset:].startswith(pieces.token_bytes(token_id).decode())


def test_special_tokens_that_a_client_wrote_count(byte_tokens):
    text = "a<|start|>b"
    ids = byte_tokens.encode(text, add_special_tokens=True)
    assert byte_tokens.special_token_ids & set(ids)
    entries = [None, *(entry(byte_tokens, token_id, -1.0) for token_id in ids[1:])]
    echoed = echo_logprobs(entries, ids, text, byte_tokens)
    assert echoed.text_offset == [0, 1, 10]
    assert echoed.tokens == ["a", "<|start|>", "b"]
    assert echoed.token_logprobs == [None, -1.0, -1.0]
