"""Names of adapters and their folders."""

import os
from pathlib import Path

import pytest

from troupellm.actors.adapters.folders import allowed_folder, find_below
from troupellm.actors.adapters.registry import AdapterRegistry
from troupellm.protocol.config.lora import MOST_ADAPTERS
from troupellm.protocol.errors import InvalidRequest, ModelNotFound
from troupellm.protocol.messages.adapters import AdapterInfo


def info(name: str) -> AdapterInfo:
    return AdapterInfo(name=name, digest=name, folder=f"/{name}", parent="base", rank=1, num_bytes=1)


def test_a_full_registry_forgets_what_a_resolver_finds_again_and_nothing_else() -> None:
    registry = AdapterRegistry(["base"])
    registry.add(info("kept"))
    for number in range(MOST_ADAPTERS - 1):
        registry.add(info(f"found-{number}"), resolved=True)
    registry.use("found-0")
    registry.check("new")
    registry.add(info("new"))
    assert len(registry) == MOST_ADAPTERS
    assert registry.get("found-1") is None
    assert all(registry.get(name) for name in ("kept", "found-0", "new"))


def test_one_adapter_too_many_is_refused() -> None:
    registry = AdapterRegistry(["base"])
    for number in range(MOST_ADAPTERS):
        registry.add(info(f"a{number}"))
    with pytest.raises(InvalidRequest, match="4096 adapters are served"):
        registry.check("one-more")
    registry.check("a1", replace=True)


def test_missing_names_are_bounded() -> None:
    registry = AdapterRegistry(["base"])
    for number in range(100_000):
        registry.note_missing(f"n{number}", 0.0)
    assert not registry.is_missing("n0", 1.0)
    assert registry.is_missing("n99999", 1.0)


def test_an_error_lists_a_bounded_number_of_names() -> None:
    registry = AdapterRegistry(["base"])
    for number in range(1000):
        registry.add(info(f"adapter-{number}"))
    error = registry.not_found("x" * 100_000)
    assert isinstance(error, ModelNotFound)
    assert "and 969 more" in error.message
    assert len(error.message) < 1000


@pytest.fixture
def roots(tmp_path: Path) -> Path:
    (tmp_path / "loras" / "sql").mkdir(parents=True)
    (tmp_path / "loras" / "sql" / "adapter_config.json").write_text("{}")
    (tmp_path / "loras" / "empty").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "adapter_config.json").write_text("{}")
    (tmp_path / "loras" / "out").symlink_to(tmp_path / "secret")
    return tmp_path / "loras"


def test_a_folder_below_a_root_is_found_by_its_name(roots: Path) -> None:
    assert find_below([str(roots / "none"), str(roots)], "sql", links=False) == roots / "sql"
    for name in ("empty", "nothing", "../secret", "/secret", "sql/../sql", "", "out"):
        assert find_below([str(roots)], name, links=False) is None


def test_a_load_call_may_name_a_folder_below_a_root(roots: Path) -> None:
    assert allowed_folder("sql", [str(roots)], links=False) == roots / "sql"
    assert allowed_folder(str(roots / "sql"), ["/nowhere", str(roots)], links=False) == roots / "sql"


@pytest.mark.parametrize(
    "path", ["../secret", "/etc", "../../etc", "out", "nothing", "sql/adapter_config.json", ".", "", "a\0b", "pipe"]
)
def test_a_load_call_may_name_no_other_path(roots: Path, path: str) -> None:
    os.mkfifo(roots / "pipe")
    with pytest.raises(InvalidRequest) as caught:
        allowed_folder(path, [str(roots)], links=False)
    assert caught.value.param == "lora_path"
    assert str(roots) not in caught.value.message


def test_a_link_out_is_followed_where_links_are_allowed(roots: Path) -> None:
    assert allowed_folder("out", [str(roots)], links=True) == roots / "out"
    assert find_below([str(roots)], "out", links=True) == roots / "out"


def test_without_a_root_no_load_call_reads_a_folder(roots: Path) -> None:
    with pytest.raises(InvalidRequest, match="--lora-dir"):
        allowed_folder(str(roots / "sql"), [], links=False)
