"""Selects the safetensors files that are a model's weights; a download, a cached snapshot and a folder share the rule.

In this order: the files of the index; model.safetensors; a complete NAME-00001-of-N; the only safetensors file; all of
them. Copies in another layout (consolidated*), adapters and optimizer states are never weights.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from troupellm.models.hub.errors import plain_name, why
from troupellm.models.hub.json_file import LFS_POINTER, MOST_BYTES, lfs_pointer
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import ModelLoadError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_OTHERS = (".h5", ".onnx", ".msgpack", ".tflite", ".ot")
"""Weights of other frameworks."""
NOT_WEIGHTS = ("consolidated", "adapter", "optimizer")
_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors")
_LONGEST_FILE_NAME = 255
_MOST_SHARDS = 10_000
_HINT = "download the missing file, or the whole model again"


def weight_files(names: Collection[str], homes: Mapping[str, str]) -> list[str]:
    """The names of the weight files, sorted.

    Args:
        names: of all files of the folder or repository; files in subfolders are passed over.
        homes: the file of each tensor, as the index has it; empty without an index.

    Raises:
        ModelLoadError: a file or shard is missing, or there are no safetensors; names the file.
    """
    if homes:
        listed = sorted(set(homes.values()))
        _require(listed, names, f"though {INDEX} names it")
        _refuse_left_over(listed, names)
        return listed
    if SINGLE in names:
        return [SINGLE]
    found = sorted(name for name in names if is_weight_file(name))
    if not found:
        raise no_weights(names)
    series = _series(found)
    complete = [one for one, numbers in series.items() if len(numbers) == one.num_shards]
    if len(complete) == 1:
        return complete[0].files()
    if series and not complete:
        _require(next(iter(series)).files(), found, f"one of {next(iter(series)).num_shards} shards")
    return found


def is_weight_file(name: str) -> bool:
    """True if a file may hold weights of the model."""
    return name.endswith(".safetensors") and "/" not in name and not name.startswith(NOT_WEIGHTS)


def no_weights(names: Iterable[str]) -> ModelLoadError:
    """The error that refuses a folder or repository without safetensors weights; it names the reason."""
    names = sorted(name for name in names if "/" not in name)
    pickle = next((name for name in names if name.endswith(PICKLES) and name != "training_args.bin"), None)
    if pickle is not None:
        return ModelLoadError(
            f"{SINGLE} is missing; there are only pickled weights, such as {plain_name(pickle)}, "
            "which can run code when they are read",
            hint="convert them with the `safetensors` package, or look for a safetensors version of the model",
        )
    other = next((name for name in names if name.endswith(_OTHERS)), None)
    instead = "" if other is None else f"; weights such as {plain_name(other)} are not read"
    return ModelLoadError(f"{SINGLE} is missing{instead}", hint="give a model with safetensors weights or a GGUF file")


def folder_weight_files(folder: Path) -> list[str]:
    """The names of the weight files in a folder.

    Raises:
        ModelLoadError: as `weight_files` and `folder_homes`; or a file is a link out of the folder.
    """
    homes = folder_homes(folder)
    try:
        names = {path.name for path in folder.iterdir() if path.exists() and not path.is_dir()}
    except OSError as error:
        raise ModelLoadError(f"{plain_name(folder.name)} cannot be read: {why(error)}") from error
    listed = weight_files(names, homes)
    for name in listed:
        check_file(folder / name)
    return listed


def folder_homes(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the folder's index has it; empty without an index.

    Raises:
        ModelLoadError: the index is damaged or too large, or names a file outside the folder.
    """
    path = folder / INDEX
    check_file(path)
    try:
        if not path.is_file():
            return {}
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ModelLoadError(f"{INDEX} has {size:,} bytes; JSON files of at most {MOST_BYTES:,} are read")
        return read_index(path.read_bytes())
    except OSError as error:
        raise ModelLoadError(f"{INDEX} cannot be read: {why(error)}") from error


def read_index(data: bytes) -> dict[str, str]:
    """The file of each tensor.

    Args:
        data: the content of model.safetensors.index.json.

    Raises:
        ModelLoadError: it is damaged, or names a file outside its folder.
    """
    if data.startswith(LFS_POINTER):
        raise lfs_pointer(INDEX)
    try:
        index = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{INDEX} cannot be read: {why(error)}") from error
    homes = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(homes, dict) or not homes or not all(isinstance(file, str) for file in homes.values()):
        raise ModelLoadError(f"{INDEX}: weight_map must map tensors to files")
    for file in sorted(set(homes.values())):
        if PurePosixPath(file).name != file or not file.endswith(".safetensors") or len(file) > _LONGEST_FILE_NAME:
            raise ModelLoadError(f"{INDEX}: {plain_name(file)!r} is not the name of a safetensors file in this folder")
    return homes


class _Series(NamedTuple):
    """The shards NAME-i-of-N of one name, one N and one number of digits."""

    name: str
    total: str
    """N as it is written."""
    digits: int

    @property
    def num_shards(self) -> int:
        return int(self.total)

    def files(self) -> list[str]:
        return [
            f"{self.name}-{number:0{self.digits}}-of-{self.total}.safetensors"
            for number in range(1, self.num_shards + 1)
        ]


def _series(names: Iterable[str]) -> dict[_Series, set[int]]:
    """Each series that occurs, and the numbers of its shards that do."""
    found = defaultdict[_Series, set[int]](set)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match is not None and 0 < int(match["number"]) <= int(match["count"]) <= _MOST_SHARDS:
            found[_Series(match["name"], match["count"], len(match["number"]))].add(int(match["number"]))
    return found


def _refuse_left_over(listed: Collection[str], names: Iterable[str]) -> None:
    """Shards of a series whose other shards the index names."""
    listed_series, known = _series(listed), set(listed)
    left = next(
        (name for name in sorted(names) if name not in known and listed_series.keys() & _series([name]).keys()), None
    )
    if left is not None:
        hint = "remove it, or download the index again"
        raise ModelLoadError(f"{plain_name(left)} is left over: {INDEX} does not name it", hint=hint)


def _require(listed: Iterable[str], names: Collection[str], why_wanted: str) -> None:
    missing = next((name for name in listed if name not in names), None)
    if missing is not None:
        raise ModelLoadError(f"{plain_name(missing)} is missing, {why_wanted}", hint=_HINT)
