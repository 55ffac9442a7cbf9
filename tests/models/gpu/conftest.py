"""Models and devices of these tests."""

import pytest

from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.gpu.pretended_gpu import pretend_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("llama"), FAMILIES["llama"]())
