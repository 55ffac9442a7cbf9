"""Finds the files of a hub model on this machine: downloads them, or takes them from the cache."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from troupellm.models.hub.cache import Cache
from troupellm.models.hub.download import Repository, Unavailable
from troupellm.models.hub.errors import plain_name, why
from troupellm.models.hub.files import CONFIG, TOKENIZER, files_beside, has_tokenizer, small_files
from troupellm.models.hub.gguf_choice import choose_gguf, is_companion
from troupellm.models.hub.local_files import ADAPTER_CONFIG, adapter_refusal, is_adapter
from troupellm.models.hub.name import HubName
from troupellm.models.hub.weight_files import folder_homes, is_weight_file, no_weights, weight_files
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

_MAIN = "main"
_RETRY = "start again: a download resumes where it stopped; or name a local folder"


class HubModel:
    """One model of the hub. Environment: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE."""

    def __init__(self, name: HubName, config: ModelConfig, progress: ProgressSink) -> None:
        """
        Args:
            name: with the revision that is asked for.
            config: with `load_format` "dummy" no safetensors are fetched.
        """
        from huggingface_hub import constants, errors  # submodules, which the package itself loads lazily

        self._errors = errors
        self._name, self._progress = name, progress
        self._revision = name.revision or _MAIN
        self._with_weights = config.load_format != "dummy"
        self._with_tokenizer = config.tokenizer is None
        folder = Path(config.download_dir).expanduser() if config.download_dir else Path(constants.HF_HUB_CACHE)
        self._cache = Cache(folder, name.repo)
        endpoint = os.environ.get("HF_ENDPOINT") or None
        self._hub = Repository(name.repo, self._cache, token=config.hf_token, endpoint=endpoint, progress=progress)

    def resolve(self, check: Callable[[Path], None]) -> Path:
        """The folder with the model's files, or its GGUF file.

        Args:
            check: is called with the folder before safetensors are downloaded; may refuse it by a ModelLoadError.

        Raises:
            ModelLoadError: there is no such model, or it can neither be fetched nor found in the cache.
        """
        errors = self._errors
        if _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE"):
            return self._from_cache("offline mode is on", None)
        self._note(f"looking up {self._name.repo} on the hub")
        try:
            self._hub.open(self._revision)
            return self._download(check)
        except ModelLoadError:
            raise
        except (errors.HfHubHTTPError, errors.HFValidationError) as error:
            return self._after_refusal(error)
        except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
            return self._from_cache(f"the hub cannot be reached ({_short(error)})", error)
        except Unavailable as error:
            return self._from_cache(str(error), error)
        except OSError as error:
            raise ModelLoadError(
                f"{self._name.repo} cannot be written to {self._cache.root}: {why(error)}",
                hint="name another folder with --download-dir",
            ) from error
        finally:
            self._note("")  # a download is over, also where it has failed

    def _download(self, check: Callable[[Path], None]) -> Path:
        """Raises ModelLoadError, Unavailable, OSError or the HTTP library's errors."""
        hub, names = self._hub, self._hub.names
        folder = self._cache.snapshot(hub.commit)
        if self._is_gguf(names):
            choice = choose_gguf(names, self._name.repo, tag=self._name.tag, file=self._name.file)
            for note in choice.notes:
                self._note(note)
            beside = files_beside(names, choice.files[0]) if self._with_tokenizer else []
            hub.fetch([*beside, *choice.files])
            path = folder / choice.files[0]
        else:
            self._check_kind(names)
            hub.fetch(small_files(names, with_tokenizer=self._with_tokenizer))
            if self._with_weights:
                weights = weight_files(names, folder_homes(folder))
                check(folder)
                hub.fetch(weights)
            path = folder
        self._cache.record(self._revision, hub.commit)
        return path

    def _is_gguf(self, names: Collection[str]) -> bool:
        if self._name.tag is not None or self._name.file is not None:
            return True
        if any(map(is_weight_file, names)):
            return False
        return any(name.lower().endswith(".gguf") and not is_companion(name) for name in names)

    def _check_kind(self, names: Collection[str]) -> None:
        """Refuse a repository that is no model in Hugging Face's format, before anything of it is fetched."""
        if is_adapter(names, with_weights=self._with_weights):
            self._hub.fetch([ADAPTER_CONFIG])
            raise adapter_refusal(self._name.repo, self._cache.snapshot(self._hub.commit))
        if CONFIG not in names and (self._with_weights or not has_tokenizer(names)):
            raise ModelLoadError(
                f"{self._name.repo} has no {CONFIG}", hint="name a model in Hugging Face's format, or a GGUF file"
            )
        if self._with_weights and not any(map(is_weight_file, names)):
            error = no_weights(names)
            raise ModelLoadError(f"{self._name.repo}: {error.message}", hint=error.hint)

    def _after_refusal(self, error: Any) -> Path:
        """The cached snapshot where the hub fails; where it refuses, the refusal.

        Raises:
            ModelLoadError: its text says how to fix it.
        """
        errors, repo = self._errors, self._name.repo
        if isinstance(error, errors.GatedRepoError):
            raise ModelLoadError(
                f"{repo} is gated", hint="accept its terms on the hub and set HF_TOKEN or --hf-token"
            ) from error
        if isinstance(error, errors.RevisionNotFoundError):
            known = ", ".join(map(plain_name, self._hub.revisions()))
            raise ModelLoadError(
                f"{repo} has no revision {plain_name(self._revision)}", hint=f"there are {known}" if known else ""
            ) from error
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            raise not_found(repo) from error
        response = error.response
        status = response.status_code
        if status == 401 and "Invalid credentials" in response.headers.get("X-Error-Message", ""):
            raise ModelLoadError(f"{repo}: the hub refuses the token", hint="set HF_TOKEN or --hf-token") from error
        if status in (401, 404) and not isinstance(error, errors.EntryNotFoundError):
            raise not_found(repo) from error
        if status != 429 and status < 500:
            raise ModelLoadError(f"{repo}: the hub answers {status}: {_short(error)}") from error
        wait = plain_name(response.headers.get("Retry-After", ""))
        after = f" (try again after {wait}{' s' if wait.isdecimal() else ''})" if wait else ""
        return self._from_cache(f"the hub answers {status}{after}", error)

    def _from_cache(self, reason: str, cause: Exception | None) -> Path:
        """The model from a complete snapshot of an earlier download.

        Raises:
            ModelLoadError: names the first missing file and the folder that was searched.
        """
        try:
            path = self._cached()
        except ModelLoadError as error:
            raise ModelLoadError(
                f"{self._name.repo}: {reason}, and the cache folder {self._cache.root} has no complete copy: "
                f"{error.message}",
                hint="download the model once with a connection, or name a local folder" if cause is None else _RETRY,
            ) from cause
        commit = self._cache.commit_of(self._revision) or ""
        self._note(f"{self._name.repo}: {reason}; commit {commit[:12]} is served from the cache")
        return path

    def _cached(self) -> Path:
        """Raises ModelLoadError for the first missing file."""
        commit = self._cache.commit_of(self._revision)
        names = self._cache.names(commit) if commit is not None else frozenset()
        if commit is None or not names:
            raise ModelLoadError(f"{self._name.file or CONFIG} is missing")
        folder = self._cache.snapshot(commit)
        if self._is_gguf(names):
            choice = choose_gguf(names, "it", tag=self._name.tag, file=self._name.file)
            return folder / choice.files[0]
        if CONFIG not in names and self._with_weights:
            raise ModelLoadError(f"{CONFIG} is missing")
        if self._with_weights:
            weight_files(names, folder_homes(folder))
        if self._with_tokenizer and not has_tokenizer(names):
            raise ModelLoadError(f"{TOKENIZER} is missing")
        return folder

    def _note(self, text: str) -> None:
        self._progress(LoadProgress(phase="resolve", detail=text))


class NotOnHub(ModelLoadError):
    """The hub knows no model of that name, or shows it to others only."""


def not_found(model: str) -> NotOnHub:
    """The error for a name that is neither a path nor known to the hub."""
    return NotOnHub(
        f"{plain_name(model)} is neither a local folder nor a model on the hub",
        hint="check the spelling; a private model needs HF_TOKEN or --hf-token",
    )


def _short(error: Exception) -> str:
    """One line of an error of the HTTP library."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return plain_name(text.splitlines()[0])


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
