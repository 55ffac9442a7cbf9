"""Where a drafter's checkpoint comes from."""

from pathlib import Path

import pytest

from troupellm.models.hub.source import BUILTIN_FOLDER
from troupellm.models.proposers.checkpoint_folder import drafter_folder
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress


def _ignore(_progress: LoadProgress) -> None:
    pass


def test_another_models_drafter_is_not_made_up() -> None:
    with pytest.raises(ModelLoadError, match="no eagle drafter is shipped for some/model") as caught:
        drafter_folder("eagle", "builtin", ModelConfig(model="some/model"), _ignore)
    assert "a folder or a hub id" in (caught.value.hint or "")


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_method_without_a_shipped_drafter_is_refused_by_name(method: str) -> None:
    with pytest.raises(ModelLoadError, match=f"no {method} drafter is shipped with the built-in model") as caught:
        drafter_folder(method, None, ModelConfig(), _ignore)
    assert "draft_model, eagle, medusa" in (caught.value.hint or "")


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert drafter_folder("eagle", str(tmp_path), ModelConfig(model="some/model"), _ignore) == tmp_path
    # Also for the built-in model, by its own folder's name or by none.
    assert drafter_folder("medusa", str(tmp_path), ModelConfig(model=str(BUILTIN_FOLDER)), _ignore) == tmp_path
