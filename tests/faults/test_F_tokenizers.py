"""Row F4 of the fault table: tokenizers that are damaged, or that do not belong to the model beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend, models, pre_tokenizers

from troupellm.actors.input.actor import INLINE_CHARACTERS
from troupellm.models.tokenizer.served import fit_notes
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import RequestFailed
from troupellm.tests.support.checkpoints.refusals import config, content, engine_of, refused
from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH, VOCABULARY, write_tiny_model
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

FLAGS = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
NESTED = b'{"a":' * 100_000
FAR = 999


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def add(folder: Path, tokens: dict[str, int]) -> None:
    """Further entries of `added_tokens`, with these ids."""
    values = json.loads((folder / "tokenizer.json").read_text())
    values["added_tokens"] += [FLAGS | {"id": number, "content": text} for text, number in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps(values))


def numbered(last: int) -> dict[str, int]:
    """A token for every id from the end of the vocabulary on."""
    return {f"<|{number}|>": number for number in range(VOCABULARY, last + 1)}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"model": 5}', NESTED])
async def test_F4_a_damaged_tokenizer_is_refused_by_its_file(folder, text):
    content(text, "tokenizer.json")(folder)
    assert (await refused(folder)).startswith("tokenizer.json")


PANICS: dict[str, Any] = {
    "while it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AQ=="}},
    "at an empty text": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<nobody>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("change", PANICS.values(), ids=PANICS.keys())
async def test_F4_tokenizers_that_the_library_panics_on(folder, change):
    config("tokenizer.json", **change)(folder)
    assert (await refused(folder)).startswith("tokenizer.json")


async def test_F4_a_text_that_the_library_panics_on_costs_its_request_and_not_the_engine(folder):
    async with engine_of(folder) as engine:
        panicking = Backend(models.BPE({"a": 0}, []))
        panicking.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
        engine.tokenizer._backend = panicking
        for text in ("a", "a" * (INLINE_CHARACTERS + 1)):  # on the event loop, and in a thread
            with pytest.raises(RequestFailed, match="could not be prepared"):
                await engine.generate(text, max_tokens=1)
        assert len((await engine.generate([5], max_tokens=2, ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
async def test_F4_settings_beside_the_tokenizer(folder, name):
    for text in (b"[]", b"{", NESTED, b'{"x": "\xff"}'):
        content(text, name)(folder)
        assert (await refused(folder)).startswith(name)


async def test_F4_more_tokens_than_the_embedding_has_rows(folder):
    add(folder, numbered(LOGITS_WIDTH + 3))
    message = await refused(folder)
    assert message.startswith(f"tokenizer.json: token '<|{LOGITS_WIDTH}|>' has the id {LOGITS_WIDTH} and 3 more")
    assert f"has {LOGITS_WIDTH} rows" in message


async def test_F4_as_many_tokens_as_the_embedding_has_rows(folder):
    add(folder, numbered(LOGITS_WIDTH - 1))
    async with engine_of(folder) as engine:
        completion = await engine.generate(f"Hi<|{LOGITS_WIDTH - 1}|>", max_tokens=2, ignore_eos=True)
    assert len(completion.token_ids) == 2


@pytest.mark.parametrize("place", ["image_token", "pad_token", "unk_token", "extra_special_tokens"])
async def test_F4_a_token_that_stands_for_a_picture_or_for_nothing_needs_no_row_and_is_refused_in_a_prompt(
    folder, place
):
    """Families of models that see and models that do not share a tokenizer."""
    text = f"<|{LOGITS_WIDTH}|>"
    add(folder, numbered(LOGITS_WIDTH))
    named: dict[str, Any] = {place: text if place != "extra_special_tokens" else {"image_token": text}}
    config("tokenizer_config.json", **named)(folder)
    async with engine_of(folder) as engine, running_server(engine) as served, served.client() as client:
        for prompt, status in (("Hi", 200), (f"Hi{text}", 400)):
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 1})
            assert answer.status_code == status, answer.text
            assert status == 200 or str(LOGITS_WIDTH) in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
async def test_F4_an_end_token_that_is_out_of_range(folder, name):
    if name == "config.json":
        (folder / "generation_config.json").unlink()
    config(name, eos_token_id=[256, FAR])(folder)
    message = await refused(folder)
    assert message.startswith(f"{name}: eos_token_id {FAR} is beyond")


async def test_F4_a_token_that_every_prompt_gets_and_that_is_out_of_range(folder):
    piece = {"SpecialToken": {"id": "<far>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B"))
    adding = {
        "type": "TemplateProcessing",
        "single": [piece, first],
        "pair": [piece, first, second],
        "special_tokens": {"<far>": {"id": "<far>", "ids": [FAR], "tokens": ["<far>"]}},
    }
    config("tokenizer.json", post_processor=adding)(folder)
    message = await refused(folder)
    assert message.startswith(f"tokenizer.json: every prompt gets the id {FAR}")


async def test_F4_an_end_token_that_the_tokenizer_does_not_have(folder):
    (folder / "generation_config.json").unlink()
    config(eos_token_id=None)(folder)
    config("tokenizer_config.json", eos_token="<|nobody|>")(folder)
    message = await refused(folder)
    assert message == "tokenizer_config.json: eos_token '<|nobody|>' is no token of the tokenizer"


COLLIDING = {
    "with a letter": ({"<|x|>": 65}, "'<|x|>' has the id 65, which is that of"),
    "with an added one": ({"<|x|>": VOCABULARY, "<|y|>": VOCABULARY}, f"has the id {VOCABULARY}, which is that of"),
    "with nothing": ({"<|x|>": LOGITS_WIDTH - 2}, f"'<|x|>' has the id {LOGITS_WIDTH - 2}, which is not its place"),
}


@pytest.mark.parametrize(("tokens", "why"), COLLIDING.values(), ids=COLLIDING.keys())
async def test_F4_added_tokens_with_the_ids_of_others(folder, tokens, why):
    """The library gives them the next free ids instead, and every prompt would be read wrongly."""
    add(folder, tokens)
    message = await refused(folder)
    assert message.startswith("tokenizer.json: added token ")
    assert why in message


async def test_F4_an_id_that_is_out_of_all_range(folder):
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["model"]["vocab"]["far"] = 2**31
    path.write_text(json.dumps(values))
    message = await refused(folder)
    assert message.startswith("tokenizer.json")
    assert str(2**31) in message


EMPTY = {
    "no letters": {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
    "no digits": {"normalizer": {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": ""}},
    "no newline": {"normalizer": {"type": "Replace", "pattern": {"String": "\n"}, "content": " "}},
}


@pytest.mark.parametrize("change", EMPTY.values(), ids=EMPTY.keys())
async def test_F4_tokenizers_that_lose_text(folder, change):
    config("tokenizer.json", **change)(folder)
    config("tokenizer_config.json", eos_token=None)(folder)
    message = await refused(folder)
    assert message.startswith("tokenizer.json is empty or does not fit: 'Letters 0123")


async def test_F4_a_tokenizer_with_few_tokens_for_the_embedding_is_noted(folder):
    tokenizer = Tokenizer.load(folder)
    assert fit_notes(tokenizer, 2 * VOCABULARY) == []
    (note,) = fit_notes(tokenizer, 2 * VOCABULARY + 1)
    assert note.startswith(f"the tokenizer has {VOCABULARY} tokens for {2 * VOCABULARY + 1} rows of the embedding")
