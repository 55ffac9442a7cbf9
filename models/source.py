"""Where a model comes from: the built-in one, a local folder, or the Hugging Face hub.

`huggingface_hub` reads its environment when it is imported, so it is imported late, and only for hub ids. Files that
can carry code (pickles, Python modules) are never fetched.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import msgspec

from troupellm.models.gguf.header import is_gguf
from troupellm.models.model_folder import Followed, check_file, readable
from troupellm.models.resume import fetch_blob
from troupellm.protocol.config import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.worker import LoadProgress, ProgressSink

BUILTIN_NAME = "troupe-builtin"
BUILTIN_FOLDER = Path(__file__).parent / "builtin" / "weights"

_INDEX = "model.safetensors.index.json"
_SMALL_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken"})
_SMALL_NAMES = frozenset({"merges.txt", "vocab.txt"})
_TEMPLATE_FOLDER = "additional_chat_templates"
_POOLING = re.compile(r"[0-9]{1,2}_Pooling/config\.json")
"""Of sentence-transformers: how a vector is made."""
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
"""All parts of a split GGUF file but the first."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_MAIN = "main"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def served_names(config: ModelConfig) -> tuple[str, ...]:
    """Names that clients may use; the first is the one reported."""
    if config.served_model_name:
        return config.served_model_name
    if config.model is None:
        return (BUILTIN_NAME,)
    path = Path(config.model).expanduser()
    if path.is_dir():
        return (path.resolve().name,)
    return (path.resolve().stem,) if is_gguf(path) else (config.model,)


def resolve_model(config: ModelConfig, progress: ProgressSink) -> Path:
    """The folder with the model's files, or its GGUF file. Blocks: what is on the hub is downloaded first.

    With `load_format` "dummy" no weights are fetched.

    Raises:
        ModelLoadError: there is no such model, or it could not be fetched.
    """
    if config.model is None:
        if not (BUILTIN_FOLDER / "config.json").is_file():
            raise ModelLoadError(
                "the built-in model is missing from this installation", hint="name a model, or install troupellm again"
            )
        return Followed(BUILTIN_FOLDER)
    if not config.model.strip():
        raise ModelLoadError("the model's name is empty", hint="leave it out to serve the built-in model")
    folder = readable(Path(config.model).expanduser(), config.model, config.allow_model_links)
    if folder.is_dir():
        return folder if (folder / "config.json").is_file() else _only_gguf(folder)
    if is_gguf(folder):
        return folder
    if config.model.lower().endswith(".gguf"):
        raise ModelLoadError(f"{folder.name} is missing", hint="name a GGUF file on this machine, or a folder")
    if folder.exists():
        raise ModelLoadError(f"{config.model} is a file", hint="name the folder that holds config.json")
    if _looks_like_path(config.model):
        raise ModelLoadError(f"{config.model} is no folder, and no hub id either", hint="hub ids look like owner/name")
    return readable(_Hub(config, progress).resolve(), config.model, config.allow_model_links)


def _only_gguf(folder: Path) -> Path:
    """The GGUF file of a folder that is no Hugging Face model; the folder itself where there is none.

    Raises:
        ModelLoadError: there are several, or it is a link out of the folder.
    """
    files = sorted(path for path in folder.glob("*.gguf") if not _LATER_PART.search(path.name))
    if len(files) > 1:
        raise ModelLoadError(
            f"the folder has {len(files)} GGUF files", hint=f"name one of them, such as {files[0].name}"
        )
    if not files:
        return folder
    check_file(files[0])
    return files[0]


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model


class _Hub:
    """One hub repository. Environment: HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE."""

    def __init__(self, config: ModelConfig, progress: ProgressSink) -> None:
        import huggingface_hub
        from huggingface_hub import constants, errors  # submodules, which the package itself loads lazily

        self._hub, self._errors = huggingface_hub, errors
        self._repo = str(config.model)
        self._revision = config.revision or _MAIN
        self._token = config.hf_token
        self._endpoint = os.environ.get("HF_ENDPOINT") or None
        self._with_weights = config.load_format != "dummy"
        self._progress = progress
        default = constants.HF_HUB_CACHE
        self._cache = Path(config.download_dir).expanduser() if config.download_dir else Path(default)

    def resolve(self) -> Path:
        """Raises ModelLoadError."""
        errors = self._errors
        if _is_set("HF_HUB_OFFLINE") or _is_set("TRANSFORMERS_OFFLINE"):
            return self._from_cache("offline mode is on", None)
        self._progress(LoadProgress(phase="resolve", detail=self._repo))
        try:
            return self._download()
        except errors.GatedRepoError as error:
            raise ModelLoadError(
                f"{self._repo} is gated", hint="accept its terms on the hub and set HF_TOKEN or --hf-token"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ModelLoadError(f"{self._repo} has no revision {self._revision}") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            raise ModelLoadError(
                f"{self._repo} is neither a local folder nor a model on the hub",
                hint="check the spelling; a private model needs HF_TOKEN or --hf-token",
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            return self._from_cache(f"the hub answers {status}", error)
        except ModelLoadError:
            raise
        except (OSError, errors.HfHubHTTPError.__mro__[1]) as error:  # the second is the HTTP library's own root
            text = getattr(error, "strerror", None) or type(error).__name__
            return self._from_cache(f"the hub cannot be reached ({text})", error)

    def _download(self) -> Path:
        api = self._hub.HfApi(endpoint=self._endpoint, token=self._token)
        info = api.model_info(self._repo, revision=self._revision, files_metadata=True)
        sizes: dict[str, int] = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if "config.json" not in sizes:
            files = any(name.endswith(".gguf") for name in sizes)
            hint = "download one of its GGUF files and name it" if files else "a model in Hugging Face's form has one"
            raise ModelLoadError(f"{self._repo} has no config.json", hint=hint)
        small = [name for name in sizes if _is_small(name)]
        meter = _Meter(self._progress, sum(sizes[name] for name in small))
        # By the revision's name, which records what it stands for now; everything else by that commit.
        folder = self._fetch("config.json", info.sha, meter, linked_as=self._revision)
        for name in small:
            self._fetch(name, info.sha, meter)
        if self._with_weights:
            weights = _weight_files(folder, sizes)
            if not weights:
                raise ModelLoadError(
                    f"{self._repo} has no safetensors weights", hint="other weight formats can carry code"
                )
            missing = next((name for name in weights if name not in sizes), None)
            if missing is not None:
                raise ModelLoadError(f"{self._repo}: {_INDEX} names {missing}, which the repository does not have")
            meter.expect(sum(sizes[name] for name in weights))
            for name in weights:
                self._fetch(name, info.sha, meter)
        return folder

    def _fetch(self, name: str, commit: str, meter: "_Meter", *, linked_as: str | None = None) -> Path:
        """Have one file in the cache; returns the folder that it is in."""
        path = self._hub.try_to_load_from_cache(self._repo, name, cache_dir=self._cache, revision=commit)
        if not isinstance(path, str):
            fetch_blob(
                self._repo,
                name,
                revision=commit,
                cache=self._cache,
                token=self._token,
                endpoint=self._endpoint,
                bar=lambda initial: _Bar(meter, name, initial),
            )
        path = self._hub.hf_hub_download(  # links the blob that is there now
            self._repo,
            name,
            revision=linked_as or commit,
            cache_dir=self._cache,
            token=self._token,
            endpoint=self._endpoint,
        )
        meter.finished(name, os.path.getsize(path))
        return Path(path).parent

    def _from_cache(self, reason: str, cause: Exception | None) -> Path:
        """A complete snapshot from an earlier download.

        Raises:
            ModelLoadError: names the first missing file and the folder that was searched.
        """
        found = self._hub.try_to_load_from_cache(
            self._repo, "config.json", cache_dir=self._cache, revision=self._revision
        )
        missing: str | None = "config.json"
        if isinstance(found, str):
            folder = Path(found).parent
            missing = self._missing(folder)
            if missing is None:
                return folder
        raise ModelLoadError(
            f"{self._repo}: {reason} and {missing} is not in the cache folder {self._cache}",
            hint="download the model once with a connection, or name a local folder",
        ) from cause

    def _missing(self, folder: Path) -> str | None:
        if self._with_weights:
            present = {path.name: 0 for path in folder.iterdir()}
            names = _weight_files(folder, present) or ["model.safetensors"]
            absent = next((name for name in names if not (folder / name).is_file()), None)
            if absent is not None:
                return absent
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return _TOKENIZER_FILES[0]
        return None


class _Meter:
    """Bytes over all files of a download, whatever part of them was there before."""

    def __init__(self, progress: ProgressSink, total: int) -> None:
        self._progress = progress
        self._total = total
        self._finished: dict[str, int] = {}

    def expect(self, more: int) -> None:
        self._total += more

    def finished(self, name: str, size: int) -> None:
        self._finished[name] = size
        self.report(name, 0)

    def report(self, name: str, current: int) -> None:
        done = sum(self._finished.values()) + current
        self._progress(LoadProgress(phase="download", done=done, total=max(self._total, done), detail=name))


class _Bar:
    """One file's part of the meter, in the shape of a tqdm bar."""

    def __init__(self, meter: _Meter, name: str, initial: int) -> None:
        self._meter = meter
        self._name = name
        self._current = initial

    def update(self, n: float | None = 1) -> None:
        self._current += int(n or 0)
        self._meter.report(self._name, self._current)


def _is_small(name: str) -> bool:
    if _POOLING.fullmatch(name):
        return True
    path = PurePosixPath(name)
    if path.parent.name not in ("", _TEMPLATE_FOLDER) or len(path.parts) > 2:
        return False
    return path.suffix in _SMALL_SUFFIXES or path.name in _SMALL_NAMES


def _weight_files(folder: Path, names: Mapping[str, int]) -> list[str]:
    """The safetensors that make up the model: those of the index, else the single file, else all shards.

    Raises:
        ModelLoadError: the index cannot be read.
    """
    index = folder / _INDEX
    check_file(index)
    if index.is_file():
        try:
            return sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{_INDEX}: {error}") from error
    if "model.safetensors" in names:
        return ["model.safetensors"]
    return _plain_shards(names)


def _plain_shards(names: Iterable[str]) -> list[str]:
    """Top-level safetensors, but for the second copy in another layout that some repositories carry."""
    return sorted(n for n in names if n.endswith(".safetensors") and "/" not in n and not n.startswith("consolidated"))


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
