"""Rerankers that are decoders score pairs as `transformers` makes it of their answers yes and no."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from troupellm import Engine
from troupellm.actors.input.formatted_pair import formatted_pair
from troupellm.models.config.pooling_config import YES_NO_PAIR
from troupellm.models.tokenizer.tokenizer import Tokenizer as ServedTokenizer
from troupellm.protocol.errors import ConfigError, InvalidRequest, ModelLoadError
from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer
from troupellm.tests.support.checkpoints.decoder_families import SIZES
from troupellm.tests.support.engines.fixtures import SETTINGS

pytestmark = pytest.mark.anyio

NAME = "Qwen3-Reranker-tiny"
QUERY = "where does the fox live?"
DOCUMENTS = ["in the forest", "a recipe for soup", "x"]
MODULES = [{"idx": 1, "name": "1", "path": "1_LogitScore", "type": "a.modules.logit_score.LogitScore"}]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


def write(folder: Path, *, tied: bool = True) -> transformers.PreTrainedModel:
    """A Qwen3 with random weights, and a tokenizer of bytes that knows two answers."""
    folder.mkdir()
    write_tokenizer(folder, 290)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(5)
    sizes = SIZES | {"max_position_embeddings": 1024, "tie_word_embeddings": tied}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=32)).eval()
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def expected(folder: Path, model: transformers.PreTrainedModel, query: str) -> list[float]:
    """The probability of yes against no, as the model's card computes it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = [tokenizer.token_to_id(text) for text in ("no", "yes")]
    before, between, behind = YES_NO_PAIR
    texts = [f"{before}{query}{between}{document}{behind}" for document in DOCUMENTS]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    logits = [model(torch.tensor([one])).logits[0, -1, answers] for one in ids]
    return [float(one.softmax(-1)[1]) for one in logits]


@pytest.mark.parametrize("tied", [True, False])
async def test_a_published_name_scores_by_its_answers(tmp_path: Path, tied: bool) -> None:
    model = write(folder := tmp_path / NAME, tied=tied)
    async with Engine(folder, **SETTINGS) as engine:
        got = await engine.score(QUERY, DOCUMENTS)
        before, between, behind = YES_NO_PAIR
        made = [f"{document}{behind}" for document in DOCUMENTS]
        again = await engine.score(f"{before}{QUERY}{between}", made)
        with pytest.raises(InvalidRequest):
            await engine.generate("x", max_tokens=1)
    assert got == pytest.approx(expected(folder, model, QUERY), abs=1e-5)
    assert max(got) - min(got) > 1e-3
    assert again == pytest.approx(got, abs=1e-6)


@pytest.mark.parametrize("how", ["setting", "module"])
async def test_another_name_does_so_where_it_is_told(tmp_path: Path, how: str) -> None:
    model, settings = write(folder := tmp_path / "tiny"), dict[str, Any]()
    if how == "setting":
        settings = {"pooler_config": '{"score_tokens": ["yes", "no"]}'}
    else:
        write_module(folder, 292, 293)
    async with Engine(folder, **SETTINGS, **settings) as engine:
        got = await engine.score(QUERY, DOCUMENTS)
    assert got == pytest.approx(expected(folder, model, QUERY), abs=1e-5)


def write_module(folder: Path, positive: int, negative: int | None) -> None:
    (folder / "1_LogitScore").mkdir()
    (folder / "modules.json").write_text(json.dumps(MODULES))
    tokens = {"true_token_id": positive, "false_token_id": negative}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))


async def test_it_embeds_or_writes_where_the_settings_say_so(tmp_path: Path) -> None:
    write(folder := tmp_path / NAME)
    async with Engine(folder, **SETTINGS, convert="embed") as engine:
        assert len((await engine.embed("a"))[0]) == SIZES["hidden_size"]
    async with Engine(folder, **SETTINGS, runner="generate") as engine:
        assert (await engine.generate("a", max_tokens=2)).usage.completion_tokens


@pytest.mark.parametrize(("positive", "negative"), [(292, None), (292, 5), (293, 292)])
async def test_a_module_of_other_answers_is_refused(tmp_path: Path, positive: int, negative: int | None) -> None:
    write(folder := tmp_path / "tiny")
    write_module(folder, positive, negative)
    with pytest.raises(ModelLoadError, match=f"LogitScore of the tokens {positive} and {negative} is not supported"):
        async with Engine(folder, **SETTINGS):
            pass


async def test_answers_of_several_tokens_are_refused(tmp_path: Path) -> None:
    write(folder := tmp_path / "tiny")
    with pytest.raises(ConfigError, match="score_tokens: true and false must be single tokens"):
        async with Engine(folder, **SETTINGS, pooler_config='{"score_tokens": ["true", "false"]}'):
            pass


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_document_loses_what_is_too_much(tmp_path: Path, side: Any) -> None:
    write(folder := tmp_path / "tiny")
    tokenizer, form = ServedTokenizer.load(folder), ("a", "b", "c")
    document = "0123456789"
    whole, cut = formatted_pair(tokenizer, form, ("q", document), None, side)
    assert (tokenizer.decode(whole), cut) == ("aqb0123456789c", False)
    kept, cut = formatted_pair(tokenizer, form, ("q", document), len(whole) - 4, side)
    assert (tokenizer.decode(kept), cut) == ("aqb012345c" if side == "right" else "aqb456789c", True)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be at least 5"):
        formatted_pair(tokenizer, form, ("q", document), 4, side)
