"""Chooses the GGUF file of a folder or repository: by its tag, by its name, or by default."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import ModelLoadError

DEFAULT_TAG = "Q4_K_M"
SUFFIX = ".gguf"
_SAFE_TAG = "Q8_0"
"""Tag in the example of a refusal: nearly exact, and supported everywhere."""
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_SEPARATOR = re.compile(r"[-./]|_(?=(?:i?q|tq|b?f|fp|mxfp)\d)")
"""Between the words of a name; an underscore belongs to the word unless a type begins behind it (model_q4_0)."""
_TYPE = re.compile(r"(?:i?q|tq|b?f|fp|mxfp)\d+\w*")
_VARIANT = "ud"
"""UD-Q4_K_XL is another file than Q4_K_XL."""
_LISTED = 20
_BEGIN_BYTES = 2**16
_NAMED = re.compile(rb"general\.(type|architecture)\x08\0\0\0([^\0])\0{7}", re.DOTALL)
"""A key, the number of the type of texts, and a length of one byte in eight."""


class GgufChoice(NamedTuple):
    """The files of one model."""

    files: tuple[str, ...]
    """All parts in order; the first one names the model."""
    notes: tuple[str, ...] = ()
    """Notes for the log: the reason for this file, and the files that are not read."""


def choose_gguf(
    names: Iterable[str],
    model: str,
    *,
    tag: str | None = None,
    file: str | None = None,
    companions: Collection[str] = (),
) -> GgufChoice:
    """Choose the file of a model.

    Args:
        names: paths within the folder or repository; files of other kinds are passed over.
        model: the folder or repository as the user names it, for messages.
        tag: a part of the file's or its folder's name between separators, in any case.
        file: the path of one file, or of any part of it.
        companions: files that are known to be no language models, besides those whose names say it.

    Raises:
        ModelLoadError: there is no such file, there are several, or a part is missing; says which files there are.
    """
    listed = sorted(name for name in names if name.lower().endswith(SUFFIX))
    models = _models(name for name in listed if not (is_companion(name) or name in companions))
    beside = [name for name in listed if name in companions or (is_companion(name) and "mmproj" in name.lower())]
    notes = [f"{plain_name(beside[0])} is beside the model: images are not read, text is"] if beside else []
    if file is not None:
        chosen = _named(file, listed, models, model)
    elif tag is not None:
        chosen = _tagged(tag, models, model)
    else:
        chosen = _default(models, model)
        if len(models) > 1:
            notes.append(f"{model} has {len(models)} GGUF files; {plain_name(chosen)} is taken")
    present = set(listed)
    missing = next((part for part in models[chosen] if part not in present), None)
    if missing is not None:
        raise ModelLoadError(
            f"{plain_name(missing)} is missing; it is one of {len(models[chosen])} parts of this model",
            hint="download the missing part, or take another file",
        )
    return GgufChoice(models[chosen], tuple(notes))


def is_companion(name: str) -> bool:
    """True if a GGUF file's name shows that it is no language model: a projector of images, or an importance matrix."""
    base = PurePosixPath(name).name.lower()
    return "mmproj" in base or "imatrix" in base


def named_companions(folder: Path, names: Iterable[str]) -> list[str]:
    """The files whose metadata mark them as projectors of images.

    Args:
        names: paths within the folder.
    """
    return [name for name in names if _is_projector(folder / name)]


def _is_projector(path: Path) -> bool:
    """True if the first metadata, where converters write the kind of a file, name a projector's architecture or type.

    The file may be damaged or no GGUF file at all: reading it later reports that.
    """
    try:
        check_file(path)
        with path.open("rb") as file:
            begin = file.read(_BEGIN_BYTES)
    except (OSError, ModelLoadError):
        return False
    found = {match[1]: begin[match.end() : match.end() + match[2][0]] for match in _NAMED.finditer(begin)}
    return found.get(b"architecture") == b"clip" or found.get(b"type") == b"mmproj"


def folder_names(folder: Path) -> list[str]:
    """The GGUF files of a folder and of the folders in it, as paths within it."""
    found = [path for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return sorted(path.relative_to(folder).as_posix() for path in found if path.name.lower().endswith(SUFFIX))


def label(name: str) -> str:
    """The tensor types in a file name, such as Q4_K_M or UD-Q4_K_XL; without it, the file's name."""
    words = _words(name)
    for at in range(len(words) - 1, -1, -1):
        if _TYPE.fullmatch(words[at]):
            variant = at > 0 and words[at - 1] == _VARIANT
            return f"{'UD-' if variant else ''}{words[at].upper()}"
    return PurePosixPath(name).name


def _models(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The parts of each model by the name of its first one."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match is None or not 0 < int(match["count"]) < 10_000:
            found[name] = (name,)
            continue
        parts = tuple(
            f"{match['name']}-{number:05}-of-{match['count']}{match['suffix']}"
            for number in range(1, int(match["count"]) + 1)
        )
        found[parts[0]] = parts
    return found


def _words(name: str) -> list[str]:
    match = _PART.fullmatch(name)
    stem = match["name"] if match else name[: -len(SUFFIX)]
    return [word for word in _SEPARATOR.split(stem.lower()) if word]


def _has_tag(name: str, tag: str) -> bool:
    words, wanted = _words(name), [word for word in _SEPARATOR.split(tag.lower()) if word]
    return any(
        words[at : at + len(wanted)] == wanted and (wanted[0] == _VARIANT or at == 0 or words[at - 1] != _VARIANT)
        for at in range(len(words) - len(wanted) + 1)
        if wanted
    )


def _named(file: str, listed: list[str], models: dict[str, tuple[str, ...]], model: str) -> str:
    if file in listed and is_companion(file):
        raise _companion(file, models, model)
    chosen = next((first for first, parts in models.items() if file in parts), None)
    if chosen is None:
        raise ModelLoadError(f"{model} has no file {plain_name(file)}", hint=_there_are(sorted(models)))
    return chosen


def _tagged(tag: str, models: dict[str, tuple[str, ...]], model: str) -> str:
    found = [name for name in models if _has_tag(name, tag)]
    if len(found) > 1:
        raise ModelLoadError(
            f"{model} has {len(found)} GGUF files with {plain_name(tag)} in their names: {_list(found)}",
            hint=f"name the file: {model}/{plain_name(found[0])}",
        )
    if not found:
        raise ModelLoadError(
            f"{model} has no GGUF file with {plain_name(tag)} in its name", hint=_there_are(_labels(models))
        )
    return found[0]


def _default(models: dict[str, tuple[str, ...]], model: str) -> str:
    if len(models) == 1:
        return next(iter(models))
    if not models:
        raise ModelLoadError(f"{model} has no GGUF file of a language model")
    usual = [name for name in models if label(name) == DEFAULT_TAG]
    if len(usual) == 1:
        return usual[0]
    labels = _labels(models)
    types = [label(name) for name in models]
    instead = f"{model}/{plain_name(next(iter(models)))}"
    if len(set(types)) == len(types) and not any(kind.endswith(SUFFIX) for kind in types):
        instead = f"{model}:{_SAFE_TAG if _SAFE_TAG in types else types[0]}"
    raise ModelLoadError(f"{model} has {len(models)} GGUF files: {_list(labels)}", hint=f"write {instead}")


def _companion(file: str, models: dict[str, tuple[str, ...]], model: str) -> ModelLoadError:
    projector = "mmproj" in file.lower()
    kind = "a projector of images (mmproj)" if projector else "an importance matrix"
    instead = f"{model}/{plain_name(next(iter(models)))}" if models else "a GGUF file of the language model"
    return ModelLoadError(f"{plain_name(file)} is {kind}, no language model", hint=f"name {instead}")


def _labels(models: Iterable[str]) -> list[str]:
    """Labels that distinguish the files: their types if all differ, else their names."""
    names = list(models)
    labels = [label(name) for name in names]
    return labels if len(set(labels)) == len(labels) else [PurePosixPath(name).name for name in names]


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(plain_name(name) for name in names[:_LISTED]) + more


def _there_are(names: list[str]) -> str:
    return f"there are {_list(names)}" if names else "there are no GGUF files"
