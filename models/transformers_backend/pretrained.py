"""Reads a model of `transformers` from safetensors, as strictly as our own ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from troupellm.models.checkpoint.safetensors_header import check_header
from troupellm.models.hub.model_folder import check_file
from troupellm.models.hub.weight_files import INDEX, SINGLE, folder_weight_files
from troupellm.protocol.errors import ModelLoadError


def load_pretrained(
    kind: Any,
    folder: Path,
    settings: Any,
    dtype: torch.dtype,
    *,
    attention: str | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    spared: str | tuple[str, ...] = (),
) -> tuple[Any, list[str]]:
    """The model, and the names of tensors that it has no place for.

    Args:
        kind: its class.
        settings: its configuration.
        attention: name of its implementation; None leaves the choice to the library.
        tensors: instead of those of the folder's files, by the library's names.
        spared: how the names of tensors begin that may be missing.

    Raises:
        ModelLoadError: a file is missing or damaged, or a tensor is missing or has another shape.
    """
    from transformers.utils import logging

    files = folder_weight_files(folder)
    for file in files:
        check_header(folder / file)
    # The library finds files by these two names alone, and prefers the first.
    usual = files == [SINGLE] or ((folder / INDEX).is_file() and not (folder / SINGLE).is_file())
    if tensors is None and not usual:
        tensors = {name: one for file in files for name, one in load_file(folder / file).items()}
    for file in ("generation_config.json", SINGLE):  # the library reads these even if an index lists others
        check_file(folder / file)
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, report = kind.from_pretrained(
            folder if tensors is None else None,
            config=settings,
            state_dict=tensors,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        said = str(error).replace(str(folder), folder.name)
        raise ModelLoadError(f"transformers cannot read the weights: {type(error).__name__}: {said}"[:300]) from error
    finally:
        if bar:
            logging.enable_progress_bar()
    missing = [name for name in _names(report["missing_keys"]) if not name.startswith(spared)]
    refuse_tensors("missing", missing)
    refuse_tensors("mismatched", _names(report["mismatched_keys"]))
    return model, _names(report["unexpected_keys"])


def refuse_tensors(fault: str, names: list[str]) -> None:
    """Raises ModelLoadError where there are such tensors."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ModelLoadError(f"{fault} tensor {names[0]}{more}")


def _names(listed: Any) -> list[str]:
    return sorted(name if isinstance(name, str) else str(name[0]) for name in listed)
