"""Where adapters come from: folders below `lora_dir`, and resolvers that packages install."""

from pathlib import Path

import pytest

import troupellm
from troupellm.actors.adapters.resolvers import GROUP, installed_resolvers
from troupellm.protocol.errors import ConfigError
from troupellm.tests.support.adapters.tiny_adapters import write_tiny_adapter
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

pytestmark = pytest.mark.anyio

PLUG_IN = """
from pathlib import Path

class Finder:
    async def resolve(self, name):
        return Path({folder!r}) if name == "far/away" else None
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a resolver, under a name of this test's own; gives the folder of its entry points."""
    folder = write_tiny_adapter(tmp_path / "elsewhere", 1)
    (tmp_path / f"{tmp_path.name}.py").write_text(PLUG_IN.format(folder=str(folder)))
    info = tmp_path / "lora_finder-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lora-finder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfinder = {tmp_path.name}:Finder\n")
    monkeypatch.syspath_prepend(tmp_path)
    return info


async def test_an_installed_resolver_finds_the_adapter_of_a_name(installed: Path, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    settings = {"kv_cache_memory_bytes": 4 * 2**20, "device": "cpu", "num_threads": 1}
    async with troupellm.Engine(str(model), enable_lora=True, **settings) as engine:
        options = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
        found = await engine.generate([5, 6], adapter="far/away", **options)
        assert found.token_ids != (await engine.generate([5, 6], **options)).token_ids
        assert [info.name for info in engine.adapters] == ["far/away"]
        with pytest.raises(troupellm.ModelNotFound):
            await engine.generate([5, 6], adapter="nearby", **options)


def test_a_resolver_that_cannot_be_loaded_is_named(installed: Path) -> None:
    (installed / "entry_points.txt").write_text(f"[{GROUP}]\nlost = {installed.parent.name}:Lost\n")
    with pytest.raises(ConfigError, match="the LoRA resolver lost cannot be loaded"):
        installed_resolvers()
