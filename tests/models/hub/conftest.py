from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from troupellm.tests.support.hub.hub_processes import LoopbackHub, Outcome, Resolver, loopback_hub


@pytest.fixture(scope="session")
def hub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    with loopback_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(scope="session")
def resolver() -> Iterator[Resolver]:
    process = Resolver({})
    yield process
    process.close()


@pytest.fixture
def hub(hub_process: LoopbackHub) -> LoopbackHub:
    """A hub without repositories and faults."""
    hub_process.reset()
    return hub_process


@pytest.fixture
def resolve(hub: LoopbackHub, resolver: Resolver, tmp_path: Path) -> Callable[..., Outcome]:
    """Resolves a name in the resolver's process, with a cache of the test's own."""

    def outcome(
        model: str, *, env: dict[str, str | None] | None = None, checked: bool = False, **config: Any
    ) -> Outcome:
        variables: dict[str, str | None] = {"HF_HUB_OFFLINE": None, "TRANSFORMERS_OFFLINE": None, "HF_TOKEN": None}
        variables |= {"HF_ENDPOINT": hub.url} | (env or {})
        resolver.begin(model, variables, checked=checked, **{"download_dir": str(tmp_path / "cache")} | config)
        return resolver.end()

    return outcome
