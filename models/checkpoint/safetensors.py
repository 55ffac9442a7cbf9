"""Weights from a folder of safetensors files, read strictly: every tensor is requested once, and none is left over."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from troupellm.kernels.quantized_linear import Weight
from troupellm.models.checkpoint.mxfp4_experts import BLOCKS, mx_experts
from troupellm.models.checkpoint.parts import Part
from troupellm.models.checkpoint.safetensors_header import check_header
from troupellm.models.config.hf_config import FILE
from troupellm.models.config.quantization_section import FILES as QUANTIZATION_FILES
from troupellm.models.hub.errors import plain_name, why
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.model_folder import check_file
from troupellm.models.hub.steady_files import SteadyFiles
from troupellm.models.hub.weight_files import INDEX, folder_homes, folder_weight_files
from troupellm.protocol.errors import ModelLoadError

_COMPARED_ROWS = 4096
READABLE = frozenset({"F32", "BF16", "F16"})
DERIVED = (
    ".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".rotary_pos_emb.inv_freq",
    ".rotary.inv_freq", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip
"""Buffers that old checkpoints carry and that follow from config.json."""
EXACT = (".e_score_correction_bias",)
"""Kept in the type that they are stored in: such numbers are large beside their differences, which choose experts."""
ROUTER = ".gate.weight"
"""Kept too where it is stored in float32, as by ERNIE 4.5 and MiniMax M2: it chooses experts as well."""


class WeightSource(Protocol):
    """The source of the tensors from which layers are built."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name and shape, in the type and on the device to compute with."""

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """The weight of a matrix product, [out_features, in_features], quantized or not.

        Args:
            name: of the layer, without ".weight".
        """

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """The vectors of all tokens, [vocab, hidden]: plain, or in the blocks of a GGUF file."""

    def tied(self, embedding: Weight) -> Weight:
        """The head's weight of a model that shares it with the embedding."""

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """The weights of many experts out of one tensor; None where there is no such tensor.

        Args:
            name: of the tensor.
            shape: experts, out_features, in_features.
            transposed: it holds in_features before out_features.
        """

    def has(self, name: str) -> bool:
        """True if a tensor of that name exists and has not been taken yet."""


class Checkpoint:
    """The safetensors files of one folder."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        taken: Callable[[int], None] = lambda _: None,
        files: Collection[str] = (),
    ) -> None:
        """Open every file and list its tensors.

        Args:
            folder: in Hugging Face's format: one file, or an index and its shards.
            dtype: type to which tensors are converted.
            taken: called with the bytes of each tensor after its conversion.
            files: names within the folder, where they are not the usual ones.

        Raises:
            ModelLoadError: a file is missing, damaged or outside the folder, or is not the one that the index means.
        """
        self._folder, self._dtype, self._taken = folder, dtype, taken
        self._files: dict[str, Any] = {}
        self._homes: dict[str, str] = {}
        listed = files or folder_weight_files(folder)
        indexed: dict[str, str] = {} if files else folder_homes(folder)
        self._steady = SteadyFiles(folder / file for file in listed)
        for file in listed:
            check_file(folder / file)
            check_header(folder / file)
            try:
                handle: Any = safe_open(folder / file, framework="pt")
                names = [str(name) for name in handle.keys()]  # noqa: SIM118 - not a mapping
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{file} cannot be read: {why(error)}") from error
            self._files[file] = handle
            for name in names:
                if name in self._homes:
                    raise ModelLoadError(f"{file}: tensor {plain_name(name)} is in {self._homes[name]} too")
                if indexed.get(name, file) != file:
                    raise ModelLoadError(f"{INDEX}: tensor {plain_name(name)} is in {file}, not in {indexed[name]}")
                self._homes[name] = file
        self.num_tensors = len(self._homes)
        self._indexed_but_missing = {name: file for name, file in indexed.items() if name not in self._homes}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor.

        Raises:
            ModelLoadError: it is missing (or was taken before), or has another shape or an unreadable type.
        """
        return self._converted(name, self._read(name, shape, READABLE))

    def take_part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """As `PartSource.take_part`; nothing else of the tensor is read. Raises as `take`."""
        return self._converted(name, self._read(name, shape, READABLE, part))

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        exact = name.endswith(EXACT) or (name.endswith(ROUTER) and tensor.dtype == torch.float32)
        tensor = tensor if exact else tensor.to(self._dtype)
        self._taken(tensor.nbytes)
        return tensor

    def raw(self, name: str, shape: tuple[int, ...], *kinds: str) -> Tensor:
        """Read one tensor as it is stored.

        Args:
            kinds: types that it may have, as safetensors calls them, e.g. "U8".

        Raises:
            ModelLoadError: as `take`.
        """
        tensor = self._read(name, shape, frozenset(kinds))
        self._taken(tensor.nbytes)
        return tensor

    def peek(self, name: str, shape: tuple[int, ...], *kinds: str) -> Tensor:
        """As `raw`, of a small tensor that is still to be taken."""
        home = self._homes.get(name)
        tensor = self._read(name, shape, frozenset(kinds))
        if home is not None:
            self._homes[name] = home
        return tensor

    def _read(self, name: str, shape: tuple[int, ...], kinds: frozenset[str], part: Part | None = None) -> Tensor:
        file = self._homes.pop(name, None)
        if file is None:
            raise self._missing(name)
        view = self._files[file].get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise ModelLoadError(f"{file}: tensor {name} has shape {list(view.get_shape())}, expected {list(shape)}")
        if view.get_dtype() not in kinds:
            raise ModelLoadError(
                f"{file}: tensor {name} has type {view.get_dtype()}, expected one of {', '.join(sorted(kinds))}"
            )
        self._steady.check(self._folder / file)
        try:
            if part is None:
                tensor: Tensor = self._files[file].get_tensor(name)
            else:
                before = (slice(None),) * part.dim
                pieces = [view[(*before, slice(begin, end))] for begin, end in part.ranges]
                tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=part.dim)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"{file}: tensor {name} cannot be read: {why(error)}") from error
        return tensor

    def _missing(self, name: str) -> ModelLoadError:
        if (indexed := self._indexed_but_missing.get(name)) is not None:  # the index is not that of these shards
            return ModelLoadError(f"{INDEX}: tensor {name} is not in {indexed}, nor in another shard")
        files = list(self._files)
        named = " and ".join(files if len(files) < 3 else [files[0], f"{len(files) - 1} more files"])
        return ModelLoadError(f"{named}: tensor {name} is missing")

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`, of a layer's weight."""
        return self.take(f"{name}.weight", shape)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`."""
        return self.take(name, shape)

    def tied(self, embedding: Weight) -> Weight:
        """The embedding itself."""
        return embedding

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """As `WeightSource.stacked`; what is named `name`_blocks and `name`_scales is in MXFP4 and lies as `shape`."""
        if self.has(f"{name}{BLOCKS}"):
            return list(mx_experts(self, name, shape, self._dtype))
        if not self.has(name):
            return None
        experts, rows, columns = shape
        turned = rows != columns and self.shape_of(name) == shape  # by some writers, which shows unless it is square
        if not transposed or turned:
            return list(self.take(name, shape))
        return [weight.t().contiguous() for weight in self.take(name, (experts, columns, rows))]

    def has(self, name: str) -> bool:
        """True if such a tensor exists and has not been taken yet."""
        return name in self._homes

    def names(self) -> Collection[str]:
        """Names of the tensors that have not been taken yet."""
        return self._homes.keys()

    def type_of(self, name: str) -> str | None:
        """The stored type of a tensor that has not been taken yet, by its name in safetensors; None: no such tensor."""
        file = self._homes.get(name)
        return None if file is None else str(self._files[file].get_slice(name).get_dtype())

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor that was not taken yet."""
        file = self._homes.get(name)
        return None if file is None else tuple(self._files[file].get_slice(name).get_shape())

    def equal(self, first: str, second: str) -> bool:
        """True if two tensors that have not been taken yet have the same shape and numbers; reads a few rows at a time.

        Raises:
            ModelLoadError: one of them cannot be read.
        """
        if self.shape_of(first) != self.shape_of(second):
            return False
        if {self.type_of(first), self.type_of(second)} - READABLE:
            return False
        one, other = (self._files[self._homes[name]].get_slice(name) for name in (first, second))
        rows = (self.shape_of(first) or (0,))[0]
        pieces = (slice(start, start + _COMPARED_ROWS) for start in range(0, rows, _COMPARED_ROWS))
        try:
            return all(torch.equal(one[piece].float(), other[piece].float()) for piece in pieces)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"tensors {first} and {second} cannot be read: {why(error)}") from error

    def ignore_all(self, prefix: str) -> None:
        """Accept tensors that the model does not need."""
        for name in [name for name in self._homes if name.startswith(prefix)]:
            del self._homes[name]

    def ignore(self, name: str) -> None:
        """Accept a tensor that the model does not need."""
        self._homes.pop(name, None)

    def finish(self) -> None:
        """Check that nothing is left over and that the files are those of the beginning, and close them.

        Raises:
            ModelLoadError: a tensor was not asked for, or a file has changed meanwhile.
        """
        self._steady.check()
        unknown = [name for name in self._homes if not name.endswith(DERIVED)]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelLoadError(f"{self._homes[unknown[0]]}: unknown tensor {plain_name(unknown[0])}{more}")
        self._files.clear()


class RandomWeights:
    """Seeded random tensors instead of a checkpoint: for benchmarks."""

    def __init__(
        self, dtype: torch.dtype, seed: int = 0, scale: float = 0.02, device: torch.device | None = None
    ) -> None:
        self._dtype, self._scale, self._device = dtype, scale, device or torch.device("cpu")
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Ones for norms, zeros for biases, else normal numbers."""
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, value, dtype=self._dtype, device=self._device)
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self._device)
        return drawn.mul_(self._scale).to(self._dtype)

    def take_part(self, name: str, shape: tuple[int, ...], part: Part) -> Tensor:
        """As `PartSource.take_part`: the same numbers as in the whole tensor."""
        whole = self.take(name, shape)
        return torch.cat([whole.narrow(part.dim, begin, end - begin) for begin, end in part.ranges], dim=part.dim)

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`, of a layer's weight."""
        return self.take(f"{name}.weight", shape)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`."""
        return self.take(name, shape)

    def tied(self, embedding: Weight) -> Weight:
        """The embedding itself."""
        return embedding

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """As `take`, of each expert."""
        return [self.take(name, shape[1:]) for _ in range(shape[0])]

    def has(self, name: str) -> bool:
        """There is every tensor."""
        return True


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Check that no file of the model, settings included, changes while the block runs.

    Args:
        folder: of the model, or its GGUF file.

    Raises:
        ModelLoadError: a file has changed or is gone; raised when the block ends.
    """
    steady = SteadyFiles(model_files(folder))
    yield
    steady.check()


def model_files(folder: Path) -> list[Path]:
    """The weights of a model and the files that say how to read them, some of which may be missing.

    Args:
        folder: of the model, or its GGUF file.
    """
    if is_gguf(folder):
        return [folder]
    files = [folder / FILE, folder / INDEX, *(folder / name for name in QUANTIZATION_FILES)]
    with suppress(ModelLoadError):  # which is raised again when they are read, if they are
        files += [folder / name for name in folder_weight_files(folder)]
    return files
