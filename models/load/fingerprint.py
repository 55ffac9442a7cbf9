"""One digest of everything besides tokens that a KV block's content depends on: weights, architecture, types, layout.

The digest is part of the root of the prefix hash. Engines that differ in any of these inputs have no block key in
common, so an engine never finds a block that a different one has kept.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.quantization_section import FILES as QUANTIZATION_FILES
from troupellm.models.hub.gguf_header import is_gguf, read_header
from troupellm.models.hub.model_folder import check_file
from troupellm.models.hub.secret import secret_file
from troupellm.models.hub.weight_files import folder_weight_files
from troupellm.models.layers.cache_layout import cache_layout
from troupellm.models.layers.rope import length_matters
from troupellm.models.load.weight_state import require_same, weight_state
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError, WeightsChanged
from troupellm.protocol.messages.weight_file import WeightFile

FORMAT = "troupellm KV block 1"
"""Format of blocks' bytes; changes with their layout."""
PART_BYTES = 64 * 2**20
"""Files are digested in parts of this many bytes, several at once."""
_READ_BYTES = 2**20


def model_fingerprint(
    folder: Path,
    model: DecoderConfig,
    config: EngineConfig,
    *,
    dtype: str,
    cache_dtype: str,
    longest: int,
    extra: Sequence[str] = (),
) -> str:
    """64 hexadecimal digits.

    Args:
        folder: of the checkpoint, or a GGUF file.
        model: as it is run, cache groups included.
        dtype: of activations.
        cache_dtype: of keys and values.
        longest: tokens of a sequence, as it is served: some models rotate their keys by it.
        extra: further inputs: the digest of each drafter whose keys and values are in the blocks.

    Raises:
        OSError: a file cannot be read.
    """
    said = {
        "format": FORMAT,
        "weights": _weights(folder, config),
        "model": msgspec.to_builtins(model),
        "layout": msgspec.to_builtins(cache_layout(model)),
        "dtype": dtype,
        "cache_dtype": cache_dtype,
        "quantization": config.model.quantization,
        "gguf_inputs": config.model.gguf_inputs,
        "block_size": config.cache.block_size,
        "rotations": _rotations(model, longest),
        "batch_invariant": config.worker.batch_invariant,
        "extra": list(extra),
    }
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


class SameModel:
    """Remembers the weights of the first load: those that are read again after a sleep must be the same.

    Attributes:
        fingerprint: empty before `check`, and always where no block outlives the engine, since it is not needed there.
            Without it the state of the files is compared, which takes no time.
    """

    def __init__(self, compute: Callable[[], str] | None, state: Callable[[], tuple[WeightFile, ...]]) -> None:
        self._compute, self._state = compute, state
        self._first: tuple[WeightFile, ...] | None = None
        self.fingerprint = ""

    def check(self) -> None:
        """Compare the weights with the first ones; to be called each time weights were read.

        Raises:
            ModelLoadError: the weights cannot be read again.
            WeightsChanged: they differ from the first ones.
        """
        if self._compute is None:
            state = self._state()
            require_same(state if self._first is None else self._first, state)
            self._first = state
            return
        try:
            now = self._compute()
        except OSError as error:
            raise ModelLoadError(f"the weights cannot be read: {error.strerror}") from error
        if self.fingerprint and now != self.fingerprint:
            raise WeightsChanged(
                "the weights on disk are others than those that kept KV blocks are of", hint="restart the engine"
            )
        self.fingerprint = now


def same_model(
    folder: Path,
    model: DecoderConfig,
    config: EngineConfig,
    dtype: object,
    cache_dtype: object,
    longest: int,
    extra: Callable[[int], Sequence[str]],
) -> SameModel:
    """The `SameModel` of a worker; arguments as of `model_fingerprint`, dtypes as torch's objects."""
    state = partial(weight_state, folder, config.model)
    if secret_file(config) is None:
        return SameModel(None, state)
    types = {"dtype": str(dtype), "cache_dtype": str(cache_dtype)}
    fingerprint = partial(model_fingerprint, folder, model, config, longest=longest, **types)
    return SameModel(lambda: fingerprint(extra=extra(longest)), state)


def files_digest(files: Sequence[Path]) -> str:
    """Of the content of files and their order; 64 hexadecimal digits. Parts are digested on all cores.

    Raises:
        ModelLoadError: one is a link out of its folder, a pipe or a device.
        OSError: one cannot be read.
    """
    for file in files:
        check_file(file)
    parts = [part for file in files for part in _parts(file)]
    with ThreadPoolExecutor(os.cpu_count() or 1, "troupellm-digest") as pool:
        digests = list(pool.map(_digest, parts))
    sizes = b"".join(file.stat().st_size.to_bytes(8, "little") for file in files)
    return sha256(sizes + b"".join(digests)).hexdigest()


def _rotations(model: DecoderConfig, longest: int) -> list[int]:
    """By layer, the number by which the served length changes the rotation of its keys (see `length_matters`)."""
    if model.implementation == "transformers":  # its rotations are not known here
        return [longest]
    return [0 if shape.rope is None else length_matters(shape.rope, longest) for shape in model.layers]


def _weights(folder: Path, config: EngineConfig) -> str:
    if config.model.load_format == "dummy":
        return f"random {config.model.seed}"
    return checkpoint_digest(folder)


def checkpoint_digest(folder: Path) -> str:
    """Of a folder's weights, config.json and quantization files, or of a GGUF file with all parts.

    Raises as `files_digest`.
    """
    if is_gguf(folder):
        return files_digest(sorted({folder, *(tensor.file for tensor in read_header(folder).tensors.values())}))
    settings = [folder / "config.json", *(folder / name for name in QUANTIZATION_FILES if (folder / name).is_file())]
    return files_digest([*settings, *(folder / name for name in folder_weight_files(folder))])


def _parts(file: Path) -> Iterator[tuple[Path, int]]:
    for begin in range(0, file.stat().st_size, PART_BYTES):
        yield file, begin


def _digest(part: tuple[Path, int]) -> bytes:
    path, begin = part
    digest, left = sha256(), PART_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while left and (piece := file.read(min(left, _READ_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.digest()
