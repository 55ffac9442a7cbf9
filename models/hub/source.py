"""Finds a model: the built-in one, a local folder or GGUF file, or one of the Hugging Face hub.

A path that exists wins. `huggingface_hub` reads its environment when it is imported, so it is imported late, and only
for hub ids. Files that can carry code (pickles, Python modules) are never fetched.
"""

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.gguf_choice import SUFFIX, choose_gguf, folder_names, is_companion, named_companions
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.local_files import check_folder, check_pointers
from troupellm.models.hub.model_folder import Followed, check_file, readable
from troupellm.models.hub.name import SCHEME, HubName, chosen_revision, parse_hub_name
from troupellm.models.hub.resolve import HubModel, not_found
from troupellm.models.hub.weight_files import is_weight_file
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

BUILTIN_NAME = "troupe-builtin"
BUILTIN_FOLDER = Path(__file__).parents[1] / "builtin" / "weights"


def served_names(config: ModelConfig) -> tuple[str, ...]:
    """Names that clients may use; the first is the one reported."""
    if config.served_model_name:
        return config.served_model_name
    if config.model is None:
        return (BUILTIN_NAME,)
    path, tag = _local(config.model)
    if path is not None:
        name = path.resolve().stem if is_gguf(path) else path.resolve().name
        return (name if tag is None else f"{name}:{tag}",)
    hub = parse_hub_name(config.model)
    if hub is None:
        return (config.model,)
    return (hub.with_tag if hub.file is None else PurePosixPath(hub.file).stem,)


def resolve_model(config: ModelConfig, progress: ProgressSink, check: Callable[[Path], None] = lambda _: None) -> Path:
    """The folder with the model's files, or its GGUF file. Blocks: a model of the hub is downloaded first.

    With `load_format` "dummy" no safetensors are fetched.

    Args:
        check: is called with the folder of a hub model before its safetensors are downloaded; may refuse it.

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
    path, tag = _local(config.model)
    if path is not None:
        if config.revision is not None:
            _note(progress, f"--revision {plain_name(config.revision)} is ignored: it is for hub ids")
        return _resolve_local(readable(path, config.model, config.allow_model_links), tag, config, progress)
    hub = _hub_name(config.model)
    hub = hub._replace(revision=chosen_revision(hub, config.revision))
    return readable(HubModel(hub, config, progress).resolve(check), config.model, config.allow_model_links)


def _local(model: str) -> tuple[Path | None, str | None]:
    """The existing path that is named, and the tag behind it; no path where there is none."""
    path = _existing(model)
    if path is not None:
        return path, None
    folder, colon, tag = model.rpartition(":")
    path = _existing(folder) if colon and tag and "/" not in tag else None
    return (path, tag) if path is not None and path.is_dir() else (None, None)


def _existing(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # longer than a path can be, or the home of an unknown user
        return None


def _resolve_local(path: Path, tag: str | None, config: ModelConfig, progress: ProgressSink) -> Path:
    """Raises ModelLoadError."""
    if is_gguf(path):
        if is_companion(path.name):
            choose_gguf(folder_names(path.parent), _shown(path.parent), file=path.name)  # refuses it, with another one
        check_pointers(path.parent, [path.name])
        return path
    if not path.is_dir():
        raise ModelLoadError(f"{config.model} is a file", hint="name the folder that holds config.json")
    files = folder_names(path)
    if tag is None and not _prefers_gguf(path, files):
        check_folder(path, with_weights=config.load_format != "dummy")
        return path
    choice = choose_gguf(files, _shown(path), tag=tag, companions=named_companions(path, files))
    for note in choice.notes:
        _note(progress, note)
    for name in choice.files:
        check_file(path / name, path)
    check_pointers(path, choice.files)
    return path / choice.files[0]


def _prefers_gguf(folder: Path, files: list[str]) -> bool:
    """True if a folder's model is one of its GGUF files and not the safetensors in it."""
    return bool(files) and not any(is_weight_file(path.name) for path in folder.iterdir())


def _hub_name(model: str) -> HubName:
    """Raises ModelLoadError: the text can be no hub id."""
    name = None if _looks_like_path(model) else parse_hub_name(model)
    if name is not None:
        return name
    shown = plain_name(model)
    if model.startswith(SCHEME):
        raise ModelLoadError(f"{shown} names no hub model", hint="write hf://owner/name[@revision][/file.gguf]")
    if model.lower().endswith(SUFFIX):
        raise ModelLoadError(f"{shown} is missing", hint="name a GGUF file on this machine, or a folder")
    if _looks_like_path(model) or model.count("/") > 1:
        raise ModelLoadError(f"{shown} is no folder, and no hub id either", hint="hub ids look like owner/name")
    raise not_found(model)


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or "\\" in model


def _shown(folder: Path) -> str:
    return plain_name(folder.name or str(folder))


def _note(progress: ProgressSink, text: str) -> None:
    progress(LoadProgress(phase="resolve", detail=text))
