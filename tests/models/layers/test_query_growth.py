"""Queries that grow with their position, beyond the trained context alone."""

from pathlib import Path

import msgspec
import pytest
import torch

from troupellm.models.config.decoder_config import QueryGrowth
from troupellm.models.layers.cache_layout import with_cache_groups
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import make_prompt

ORIGINAL = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("ministral"), FAMILIES["ministral3"]())


@pytest.mark.parametrize(("longest", "grows"), [(ORIGINAL, False), (ORIGINAL + 1, True), (MAX_LEN, True)])
def test_they_do_not_where_no_sequence_gets_so_long(pair: Pair, longest: int, grows: bool) -> None:
    model = with_cache_groups(pair.config, longest, hybrid=True)
    assert model.query_growth == (QueryGrowth(beta=0.3, original=ORIGINAL) if grows else None)


def test_below_the_trained_context_they_are_as_they_were(pair: Pair) -> None:
    """There the compiled layers, which a model whose queries grow does not take, compute the same."""
    plain = pair.mistaken(query_growth=None)
    assert pair.decoder.together is None
    for length, same in ((ORIGINAL, True), (ORIGINAL + 1, False)):
        prompt = make_prompt(length)
        difference = (plain.own_logits(prompt) - pair.own_logits(prompt)).abs().max()
        assert (difference < 1e-5) == same


def test_a_models_factors_are_those_of_its_description(pair: Pair, tmp_path: Path) -> None:
    """A beta of zero is no growth, and the description says so."""
    rope = {**pair.reference.config.rope_parameters, "llama_4_scaling_beta": 0}
    config = FAMILIES["ministral3"]()
    config.rope_parameters = rope
    assert Pair(tmp_path, config).config == msgspec.structs.replace(pair.config, query_growth=None)
    assert torch.isfinite(pair.own_logits(make_prompt(100))).all()
