"""A worker finds the drafter and the tokenizer that the hub gives only to those with a token."""

from pathlib import Path

import msgspec
import pytest

import troupellm
from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.models.tokenizer.served import tokenizer_folder
from troupellm.models.worker.local_names import with_local_names
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.tests.support.hub.hub_processes import LoopbackHub

TOKEN = "hf_secret"
DRAFTER, WORDS = "acme/drafter", "acme/words"
SHIPPED = drafter_folder("eagle", None, EngineConfig().model, lambda _: None)


def ignore(_progress: LoadProgress) -> None:
    pass


@pytest.fixture
def private(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> LoopbackHub:
    """Both repositories need the token."""
    hub.add(DRAFTER, SHIPPED)
    hub.add(WORDS, {"tokenizer.json": b"{}"})
    hub.behave(private={DRAFTER: TOKEN, WORDS: TOKEN})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return hub


@pytest.mark.parametrize("method", [None, "eagle"])
def test_a_drafter_and_a_tokenizer_of_the_hub_are_found_without_the_token(
    private: LoopbackHub, tmp_path: Path, method: str | None
) -> None:
    drafts = {"method": method, "model": DRAFTER, "num_speculative_tokens": 2}
    config = EngineConfig.from_flat(
        {"tokenizer": WORDS, "hf_token": TOKEN, "download_dir": str(tmp_path), "speculative_config": drafts}
    )
    home = tokenizer_folder(BUILTIN_FOLDER, config.model)
    local = with_local_names(config, home, ignore)
    asked = len(private.seen())
    model = msgspec.structs.replace(local.model, hf_token=None)
    assert local.speculation.speculative_config is not None
    folder = drafter_folder("eagle", local.speculation.speculative_config.model, model, ignore)
    assert (folder / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    assert (tokenizer_folder(BUILTIN_FOLDER, model) / "tokenizer.json").read_bytes() == b"{}"
    assert len(private.seen()) == asked


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}, {"method": "eagle"}])
def test_settings_without_names_of_the_hub_stay_as_they_are(drafts: dict[str, object] | None) -> None:
    config = EngineConfig.from_flat({"speculative_config": drafts})
    assert with_local_names(config, BUILTIN_FOLDER, ignore) == config


@pytest.mark.slow
def test_a_worker_process_drafts_with_a_drafter_that_needs_the_token(private: LoopbackHub, tmp_path: Path) -> None:
    drafts = {"method": "eagle", "model": DRAFTER, "num_speculative_tokens": 2}
    settings = {"worker_process": True, "hf_token": TOKEN, "download_dir": str(tmp_path)}
    sampling = troupellm.SamplingParams(max_tokens=8)
    with troupellm.LLM(speculative_config=drafts, **settings) as llm:
        assert llm.generate("Once upon a time", sampling)
