"""Proposers by name, and plug-ins."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from troupellm.models.proposers.ngram import NgramProposer
from troupellm.models.proposers.registry import GROUP, ProposerContext, make_proposer
from troupellm.models.proposers.suffix import SuffixProposer
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.speculation import SpeculativeConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError

CONTEXT = ProposerContext(
    decoder=cast(Any, None),
    cache=cast(Any, None),
    folder=Path(),
    model=ModelConfig(model="x"),
    dtype=torch.float32,
    max_model_len=512,
    max_num_seqs=4,
)
PLUG_IN = """
from troupellm.models.proposers.ngram import NgramProposer
from troupellm.protocol.errors import ConfigError

class Mine(NgramProposer):
    def __init__(self, config, context):
        super().__init__(lookup_min=1, lookup_max=config.most_drafts, max_model_len=context.max_model_len)

class Broken:
    def __init__(self, config, context):
        raise RuntimeError("out of ideas")

class Picky:
    def __init__(self, config, context):
        raise ConfigError("speculative_config: num_speculative_tokens must be even", param="speculative_config")

class NoProposer:
    def __init__(self, config, context):
        pass

class NoAuxHiddenStates(NgramProposer):
    aux_hidden_states = None
    def __init__(self, config, context):
        pass
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that can be imported, one of whose classes is installed."""
    (tmp_path / "guessers.py").write_text(PLUG_IN)
    info = tmp_path / "guessers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guessers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nmine = guessers:Mine\nlost = guessers:Lost\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guessers", raising=False)


def custom(name: str) -> Any:
    return make_proposer(SpeculativeConfig(method="custom", custom_class=name, num_speculative_tokens=6), CONTEXT)


def test_proposers_without_a_model_are_made_by_name() -> None:
    assert isinstance(make_proposer(SpeculativeConfig(method="ngram"), CONTEXT), NgramProposer)
    assert isinstance(make_proposer(SpeculativeConfig(method="suffix"), CONTEXT), SuffixProposer)


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize("name", ["mine", "guessers:Mine"])
def test_a_plug_in_is_made_from_the_settings(name: str) -> None:
    assert custom(name).lookup == (1, 6)


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize("name", ["others", "guessers", "guessers:", ":Mine"])
def test_what_is_not_there_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"custom_class must be module:Class or an installed plug-in .*mine"
    ) as caught:
        custom(name)
    assert caught.value.param == "speculative_config.custom_class"


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.at_all:Mine", "cannot be loaded: No module named"),
        ("guessers:Missing", "cannot be loaded: .*Missing"),
        ("lost", "cannot be loaded: .*Lost"),
        ("guessers:Broken", "cannot be loaded: out of ideas"),
        ("guessers:NoProposer", "is no proposer: it has no add_row, drop_row"),
        ("guessers:NoAuxHiddenStates", "is no proposer: its aux_hidden_states"),
    ],
)
def test_a_broken_plug_in_is_refused_by_its_name(name: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{name} {reason}"):
        custom(name)


@pytest.mark.usefixtures("plug_ins")
def test_a_plug_ins_own_refusal_comes_through() -> None:
    with pytest.raises(ConfigError, match="must be even"):
        custom("guessers:Picky")
