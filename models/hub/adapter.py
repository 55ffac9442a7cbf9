"""LoRA adapters of the hub: their two files, out of repositories that the settings allow."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.local_files import ADAPTER_CONFIG
from troupellm.models.hub.name import HubName
from troupellm.models.hub.resolve import HubModel
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.config.sizes import human_size
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress

WEIGHTS: Final = "adapter_model.safetensors"
MOST_BYTES: Final = 4 * 10**9
"""Of the weights, which a request may have fetched."""


class NoAdapter(ModelLoadError):
    """The repository holds no adapter that is fetched."""


class HubAdapter(HubModel):
    """One adapter, whose `resolve` raises NotOnHub or NoAdapter, too. Environment as of `HubModel`."""

    def __init__(self, repo: str, config: ModelConfig) -> None:
        """
        Args:
            repo: owner/name.
            config: where downloads go, and the token.
        """
        super().__init__(HubName(repo), config, _unheard)

    def _download(self, check: Callable[[Path], None]) -> Path:
        hub = self._hub
        for name in (ADAPTER_CONFIG, WEIGHTS):
            if name not in hub.names:
                raise NoAdapter(f"{self._name.repo} is no LoRA adapter: {name} is missing")
        size = hub.size(WEIGHTS)
        if size is None or size > MOST_BYTES:
            told = "no size" if size is None else human_size(size)
            most = human_size(MOST_BYTES)
            raise NoAdapter(f"{self._name.repo}: {WEIGHTS} has {told}; at most {most} are fetched")
        hub.fetch([ADAPTER_CONFIG, WEIGHTS])
        self._cache.record(self._revision, hub.commit)
        return self._cache.snapshot(hub.commit)

    def _cached(self) -> Path:
        commit = self._cache.commit_of(self._revision)
        names = frozenset() if commit is None else self._cache.names(commit)
        for name in (ADAPTER_CONFIG, WEIGHTS):
            if commit is None or name not in names:
                raise ModelLoadError(f"{plain_name(name)} is missing")
        assert commit is not None
        return self._cache.snapshot(commit)


def _unheard(progress: LoadProgress) -> None:
    """A download that a request waits for is not reported."""
