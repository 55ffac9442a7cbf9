"""Pooling in checkpoints and settings, and the values that are refused while loading."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from troupellm import Engine, PoolingParams
from troupellm.protocol.errors import ConfigError, InvalidRequest, ModelLoadError
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.servers.front_pair import front_pair

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pooling")
    write_tiny_model(root / "decoder")
    tiny_encoder.write_encoder(root / "encoder", tiny_encoder.bert, pooling="mean_tokens")
    tiny_encoder.write_encoder(root / "cross", lambda: tiny_encoder.bert(1))
    return {name: root / name for name in ("decoder", "encoder", "cross")}


async def test_only_trained_dimensions_cut_an_embedding(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert, pooling="cls_token")
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    for more, good, bad in (
        ({"is_matryoshka": True}, (1, 17, 48), (49,)),
        ({"matryoshka_dimensions": [16, 48]}, (16, 48), (8, 49)),
    ):
        (tmp_path / "config.json").write_bytes(msgspec.json.encode(config | more))
        async with Engine(tmp_path, device="cpu", num_threads=1) as engine:
            (whole,) = await engine.embed("a fox", PoolingParams(use_activation=False))
            for size in good:
                (vector,) = await engine.embed("a fox", PoolingParams(dimensions=size))
                part = np.array(whole[:size])
                np.testing.assert_allclose(vector, part / np.linalg.norm(part), atol=1e-5)
            for size in bad:
                with pytest.raises(InvalidRequest) as caught:
                    await engine.embed("a fox", PoolingParams(dimensions=size))
                assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("name", "settings", "param"),
    [
        ("encoder", {"runner": "generate"}, "runner"),
        ("encoder", {"convert": "classify"}, "convert"),
        ("encoder", {"convert": "none"}, "runner"),
        ("cross", {"convert": "embed"}, "convert"),
        ("cross", {"pooler_config": '{"pooling_type": "MEAN"}'}, "pooler_config"),
        ("encoder", {"pooler_config": '{"pooling_type": "MAX"}'}, "pooler_config"),
        ("encoder", {"pooler_config": '{"poling_type": "CLS"}'}, "pooler_config"),
        ("encoder", {"pooler_config": "CLS"}, "pooler_config"),
        ("encoder", {"max_model_len": 97}, "max_model_len"),
        ("encoder", {"max_model_len": 90, "max_num_batched_tokens": 89}, "max_num_batched_tokens"),
        ("decoder", {"runner": "pooling", "convert": "none"}, "convert"),
        ("decoder", {"convert": "classify"}, "convert"),
    ],
)
async def test_settings_that_do_not_fit(
    folders: dict[str, Path], name: str, settings: dict[str, Any], param: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        async with Engine(folders[name], device="cpu", **settings):
            pass
    assert caught.value.param == param


async def test_modules_that_are_not_built_are_refused(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert, pooling="max_tokens")
    with pytest.raises(ModelLoadError, match="pooling_mode_max_tokens is not supported"):
        async with Engine(tmp_path, device="cpu"):
            pass
    modules = msgspec.json.decode((tmp_path / "modules.json").read_bytes())
    modules.append({"path": "3_CNN", "type": "sentence_transformers.models.CNN"})
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "modules.json").write_bytes(msgspec.json.encode(modules))
    with pytest.raises(ModelLoadError, match="module CNN is not supported"):
        async with Engine(tmp_path, device="cpu"):
            pass


async def test_a_shorter_limit_of_sentence_transformers_counts(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert, pooling="cls_token", max_length=20)
    async with Engine(tmp_path, device="cpu", num_threads=1) as engine:
        assert engine.limits.max_model_len == 20
    async with Engine(tmp_path, device="cpu", num_threads=1, max_model_len=50) as engine:
        assert engine.limits.max_model_len == 50


@pytest.mark.parametrize("fronts", [False, True], ids=["one process", "an API process"])
async def test_a_caller_hears_of_each_prompt_that_the_engine_has_taken(folders: dict[str, Path], fronts: bool) -> None:
    texts = ["a fox", "the quick brown fox", "a"]
    async with Engine(folders["encoder"], device="cpu", num_threads=1) as engine, front_pair(engine) as pair:
        taken: list[int] = []
        lengths = [len(engine.tokenizer.encode(text, add_special_tokens=True)) for text in texts]
        done = 0
        async for index, pooled in (pair.remote if fronts else engine).pool(texts, concurrency=1, taken=taken.append):
            assert (index, pooled.usage.prompt_tokens) == (done, lengths[done])
            done += 1
            assert taken[:done] == lengths[:done]
        assert taken == lengths
