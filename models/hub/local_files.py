"""Recognises files of a local model folder that are not weights: Git LFS pointers, adapters, pickles."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.files import CONFIG, small_files
from troupellm.models.hub.json_file import LFS_POINTER, lfs_pointer
from troupellm.models.hub.model_folder import check_file
from troupellm.models.hub.weight_files import NOT_WEIGHTS, PICKLES, is_weight_file, no_weights
from troupellm.protocol.errors import ModelLoadError

ADAPTER_CONFIG = "adapter_config.json"
_MOST_POINTER_BYTES = 1024
_MOST_ADAPTER_BYTES = 2**20


def check_folder(folder: Path, *, with_weights: bool) -> None:
    """Refuse a folder that a model cannot be read from, with the reason.

    Args:
        with_weights: whether weights are read, too.

    Raises:
        ModelLoadError: it has Git LFS pointers instead of files, a LoRA adapter, or pickled weights only.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*")))
    if is_adapter(names, with_weights=with_weights):
        raise adapter_refusal(folder.name, folder)
    weights = [name for name in names if is_weight_file(name)]
    check_pointers(folder, [*small_files(names), *weights])
    if with_weights and not weights and any(name.endswith(PICKLES) for name in names if "/" not in name):
        raise no_weights(names)


def is_adapter(names: Collection[str], *, with_weights: bool) -> bool:
    """True if a folder or repository holds a LoRA adapter and no whole model.

    Args:
        names: of all its files.
        with_weights: weights are read, too. Without them, a folder with config.json is enough.
    """
    if ADAPTER_CONFIG not in names:
        return False
    return CONFIG not in names or (with_weights and not any(_is_whole_model(name) for name in names))


def _is_whole_model(name: str) -> bool:
    pickled = name.endswith(PICKLES) and "/" not in name and not name.startswith(NOT_WEIGHTS)
    return is_weight_file(name) or (pickled and name != "training_args.bin")


def check_pointers(folder: Path, names: Iterable[str]) -> None:
    """Links out of the folder are passed over: their reader decides about them, and Git LFS makes none.

    Raises:
        ModelLoadError: a file is a Git LFS pointer.
    """
    home = folder.resolve()
    for name in names:
        path = (folder / name).resolve()
        if not path.is_relative_to(home) or not path.is_file() or path.stat().st_size > _MOST_POINTER_BYTES:
            continue
        if path.read_bytes().startswith(LFS_POINTER):
            raise lfs_pointer(plain_name(name))


def adapter_refusal(model: str, folder: Path) -> ModelLoadError:
    """Why an adapter's folder is refused, with the base model that its adapter_config.json names."""
    path = folder / ADAPTER_CONFIG
    check_file(path, folder)
    base = None
    try:
        if path.stat().st_size <= _MOST_ADAPTER_BYTES:
            settings = json.loads(path.read_bytes())
            base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    except (OSError, ValueError, RecursionError):
        pass  # the refusal is the same
    named = plain_name(base) if isinstance(base, str) and base else "its base model"
    return ModelLoadError(
        f"{plain_name(model)} is a LoRA adapter for {named} ({ADAPTER_CONFIG}), no whole model",
        hint=f"serve {named} with --enable-lora --lora-modules name=folder",
    )
