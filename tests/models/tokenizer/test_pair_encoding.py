"""Two texts as one prompt: special tokens and cuts as the library itself makes them."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import InvalidRequest
from troupellm.tests.support.checkpoints import tiny_encoder

PAIRS = [("ab", "c"), ("abcdefghij", "xy"), ("xy", "abcdefghij"), ("abcdefgh", "ijklmnop"), ("", "abc"), ("a", "")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    tiny_encoder.write_wordpiece(made)
    return made


@pytest.mark.parametrize("side", ["right", "left"])
def test_cuts_are_those_of_longest_first(folder: Path, side: str) -> None:
    ours = Tokenizer.load(folder)
    library = Backend.from_file(str(folder / "tokenizer.json"))
    library.no_padding()
    for most in (*range(4, 25), None):
        if most is None:
            library.no_truncation()
        else:
            library.enable_truncation(most, strategy="longest_first", direction=side)
        for first, second in PAIRS:
            expected = library.encode(first, second)
            ids, segment, cut = ours.encode_pair(first, second, most=most, side=side)
            assert ids == expected.ids, (first, second, most)
            assert segment == expected.type_ids.index(1)
            assert cut == (len(ids) < len(ours.encode_pair(first, second, most=None, side=side)[0]))


def test_special_tokens_alone_are_no_prompt(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 4") as caught:
        Tokenizer.load(folder).encode_pair("ab", "c", most=3, side="right")
    assert caught.value.param == "truncate_prompt_tokens"
