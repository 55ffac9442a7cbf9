"""Requests name LoRA adapters of the hub, as far as `lora_allow_hub` has their repositories."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import troupellm
from troupellm.models.hub.adapter import MOST_BYTES
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.hub.hub_processes import LoopbackHub

pytestmark = pytest.mark.anyio

UNREAD = dict.fromkeys(("adapter_model.bin", "README.md", "training_args.bin"), b"never fetched")
FILES = ["adapter_config.json", "adapter_model.safetensors"]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def adapter(hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same as acme/sql, on this machine."""
    folder = write_tiny_adapter(tmp_path / "sql", 1)
    hub.add("acme/sql", folder)
    hub.add("acme/sql", UNREAD)
    hub.add("other/sql", folder)
    hub.add("acme/tiny", {"config.json": b"{}"})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def engine_of(adapter: Path, tmp_path: Path) -> Callable[..., troupellm.Engine]:
    model = str(write_tiny_model(tmp_path / "tiny"))
    return partial(
        troupellm.Engine, model, enable_lora=True, max_loras=2, download_dir=str(tmp_path / "cache"), **SETTINGS
    )


async def tokens(engine: troupellm.Engine, adapter: str) -> tuple[int, ...]:
    return (await engine.generate([5, 6], adapter=adapter, **GREEDY)).token_ids


async def test_an_adapter_of_the_hub_answers_as_its_folder_does(
    engine_of: Callable[..., troupellm.Engine], hub: LoopbackHub, adapter: Path
) -> None:
    async with engine_of(lora_allow_hub=["acme/*"]) as engine:
        await engine.load_adapter("mine", adapter)
        wanted = await tokens(engine, "mine")
        assert await tokens(engine, "acme/sql") == wanted
        assert await tokens(engine, "acme/sql") == wanted
        assert hub.names() == FILES
        assert [info.name for info in engine.adapters] == ["acme/sql", "mine"]
    hub.behave(status=503)
    async with engine_of(lora_allow_hub=["acme/sql"]) as engine:
        assert await tokens(engine, "acme/sql") == wanted


async def test_names_of_other_repositories_never_reach_the_hub(
    engine_of: Callable[..., troupellm.Engine], hub: LoopbackHub
) -> None:
    async with engine_of(lora_allow_hub=["acme/sql*", "acme/law"]) as engine:
        for name in ("other/sql", "acme/tiny", "acme", "acme/sql/more", "sql"):
            with pytest.raises(troupellm.ModelNotFound):
                await tokens(engine, name)
        assert hub.seen() == []
        for _ in range(2):
            with pytest.raises(troupellm.ModelNotFound):
                await tokens(engine, "acme/law")
        assert len(hub.seen()) == 1


async def test_repositories_without_an_adapter_and_a_hub_that_fails_are_told_apart(
    engine_of: Callable[..., troupellm.Engine], hub: LoopbackHub
) -> None:
    async with engine_of(lora_allow_hub=["acme/*"]) as engine:
        with pytest.raises(troupellm.AdapterError, match=r"acme/tiny is no LoRA adapter: adapter_config.json"):
            await tokens(engine, "acme/tiny")
        hub.behave(sizes={"adapter_model.safetensors": MOST_BYTES + 1})
        with pytest.raises(troupellm.AdapterError, match="at most 4.0 GB are fetched"):
            await tokens(engine, "acme/sql")
        hub.behave(status=503)
        with pytest.raises(troupellm.EngineStopped, match="the hub answers 503") as caught:
            await tokens(engine, "acme/sql")
        assert caught.value.code == "server_is_overloaded"
        hub.behave()
        await tokens(engine, "acme/sql")


def test_patterns_name_one_owner() -> None:
    for pattern in ("*/sql", "acme", "*", "acme/sql/x", "", "acme/"):
        with pytest.raises(troupellm.ConfigError, match="give owner/name or owner"):
            troupellm.Engine(None, enable_lora=True, lora_allow_hub=[pattern])
    with pytest.raises(troupellm.ConfigError, match="lora_allow_hub needs enable_lora"):
        troupellm.Engine(None, lora_allow_hub=["acme/*"])
