"""The tensors of a GGUF file under the names that layers ask for."""

from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from troupellm.kernels.quantized_linear import GgufBlocks, QuantizedWeight, Weight
from troupellm.kernels.quantized_linear.gguf import FINE, InputBits
from troupellm.models.config.gguf_config import architecture_of
from troupellm.models.config.gguf_metadata import Metadata
from troupellm.models.config.gguf_rope import ALL_FACTORS
from troupellm.models.gguf.tensor_names import Place, block_prefix, place_of
from troupellm.models.hub.gguf_header import Header, StoredTensor, read_header
from troupellm.models.hub.steady_files import SteadyFiles
from troupellm.protocol.errors import ModelLoadError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXACT = ("exp_probs_b.bias",)
"""Kept in float32: such numbers are large beside their differences, which choose experts."""
_ROTATED = (".attn_q.", ".attn_k.")
_NORM = "norm.weight"
_MERGED, _KEYS, _VALUES = "attn_kv_b", "attn_k_b", "attn_v_b"


def _drafting_tensors(header: Header, architecture: str) -> list[str]:
    """Tensors of the last layers, which draft further tokens (`nextn_predict_layers`)."""
    reader = Metadata(header, architecture).reader
    blocks, drafting = reader.integer("block_count"), reader.integer("nextn_predict_layers", 0, least=0)
    layers = tuple(f"blk.{layer}." for layer in range(blocks - drafting, blocks))
    return [name for name in header.tensors if name.startswith(layers)]


class GgufWeights:
    """A source of weights, as `Checkpoint` is one; blocks stay as they are stored.

    Attributes:
        left_out: names of the tensors of layers for further tokens (multi-token prediction).
    """

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype,
        head_dim: int,
        taken: Callable[[int], None] = lambda _: None,
        input_bits: InputBits = FINE,
    ) -> None:
        """
        Args:
            dtype: type to which plain tensors are converted, and in which products are computed.
            head_dim: of the model; where queries and keys are stored turned, its halves are put back in order.
            taken: called with the bytes of each tensor.
            input_bits: of products with blocks on a CPU.

        Raises:
            ModelLoadError: the file cannot be read.
        """
        header = read_header(path)
        self._file, self._dtype, self._head_dim, self._taken = header.name, dtype, head_dim, taken
        self._input_bits: InputBits = input_bits
        name, self._architecture = architecture_of(header)
        self.left_out = _drafting_tensors(header, name)
        self._tensors = dict(header.tensors)
        for drafting in self.left_out:
            del self._tensors[drafting]
        self._experts: dict[str, set[int]] = {}
        """By tensor with all experts, the experts that were taken."""
        self._steady = SteadyFiles({tensor.file for tensor in header.tensors.values()})

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor.

        Raises:
            ModelLoadError: it is missing (or was taken before), or has another shape.
        """
        place = self._place(name)
        shift = self._architecture.norm_offset if place.tensor.endswith(_NORM) else 0.0
        dtype = torch.float32 if shift or place.tensor.endswith(_EXACT) else self._dtype
        weight = self._weight(place, shape, dtype)
        whole = weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
        return (whole - shift).to(self._dtype) if shift else whole

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`, of a layer's weight, in the blocks that are stored."""
        place = self._place(f"{name}.weight")
        if _MERGED in place.tensor and place.tensor not in self._tensors:
            return self._merged(place.tensor, shape)
        return self._weight(place, shape, self._dtype)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`, in the blocks that are stored."""
        return self._weight(self._place(name), shape, self._dtype)

    def tied(self, embedding: Weight) -> Weight:
        """The embedding itself."""
        return embedding

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """The weights of all experts, where gate and up are in one tensor; None where each has its own.

        Args:
            name, shape: as of `WeightSource.stacked`.
            transposed: of families whose gate and up alternate, which these files do not have in one tensor.
        """
        tensor = self._place(name).tensor
        if transposed or tensor not in self._tensors:
            return None
        return [self._weight(Place(tensor, expert), shape[1:], self._dtype) for expert in range(shape[0])]

    def has(self, name: str) -> bool:
        """True if such a tensor exists and has not been taken yet."""
        return self._place(name).tensor in self._tensors

    def ignore(self, name: str) -> None:
        """Accept a tensor that the model does not need."""
        self._tensors.pop(self._place(name).tensor, None)

    def ignore_all(self, prefix: str) -> None:
        """As `ignore`, of all tensors whose names begin so."""
        for name in [name for name in self._tensors if name.startswith(block_prefix(prefix))]:
            del self._tensors[name]

    def finish(self) -> None:
        """Check that nothing is left over and that the files are those of the beginning.

        Raises:
            ModelLoadError: a tensor was not asked for, or a file has changed meanwhile.
        """
        self._steady.check()
        unknown = [name for name in self._tensors if name not in ALL_FACTORS]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelLoadError(f"{self._file}: unknown tensor {unknown[0]:.80}{more}")

    def _place(self, name: str) -> Place:
        place = place_of(name, self._architecture.names)
        return Place(place.older) if place.older in self._tensors else place

    def _weight(self, place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
        stored, name = self._stored(place), place.tensor
        # A table of one row is stored without its first size, and a convolution of each channel without its second.
        if shape not in (stored.shape, (1, *stored.shape), (*stored.shape[:1], 1, *stored.shape[1:])):
            raise ModelLoadError(f"{self._file}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}")
        weight = self._decoded(stored._replace(shape=shape), dtype)
        if not self._architecture.turned or not any(mark in name for mark in _ROTATED):
            return weight
        order = torch.arange(shape[0]).view(-1, self._head_dim // 2, 2).transpose(1, 2).flatten()
        return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]

    def _stored(self, place: Place) -> StoredTensor:
        """The place of a tensor, or of one expert of it; marks it as taken."""
        name, number = place.tensor, place.expert
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelLoadError(f"{self._file}: tensor {name} is missing")
        if number is None:
            return self._tensors.pop(name)
        taken = self._experts.setdefault(name, set())
        if len(stored.shape) != 3 or number >= stored.shape[0] or number in taken:
            raise ModelLoadError(f"{self._file}: tensor {name} has shape {list(stored.shape)}, without expert {number}")
        taken.add(number)
        if len(taken) == stored.shape[0]:
            del self._tensors[name]
        size = stored.nbytes // stored.shape[0]
        return stored._replace(shape=stored.shape[1:], offset=stored.offset + number * size, nbytes=size)

    def _merged(self, name: str, shape: tuple[int, int]) -> Tensor:
        """The weight that makes all heads' keys and values of a latent vector.

        The file has it in two tensors by head, [heads, latent, key] and [heads, value, latent].
        """
        parts = []
        for part in (_KEYS, _VALUES):
            there = name.replace(_MERGED, part)
            stored = self._stored(Place(there))
            if len(stored.shape) != 3:
                raise ModelLoadError(f"{self._file}: tensor {there} has shape {list(stored.shape)}, expected 3 sizes")
            weight = self._decoded(stored, self._dtype)
            assert isinstance(weight, Tensor)
            parts.append(weight.transpose(1, 2) if part == _KEYS else weight)
        keys, values = parts
        if keys.shape[::2] != values.shape[::2] or keys.shape[2] != shape[1]:
            raise ModelLoadError(f"{self._file}: {name.replace(_MERGED, _KEYS)} and {_VALUES} do not fit each other")
        merged = torch.cat(parts, dim=1).flatten(0, 1)
        if merged.shape != shape:
            raise ModelLoadError(f"{self._file}: tensor {name} has shape {list(merged.shape)}, expected {list(shape)}")
        return merged

    def _decoded(self, stored: StoredTensor, dtype: torch.dtype) -> Weight:
        data = self._bytes(stored)
        self._taken(data.nbytes)
        if stored.type in _PLAIN:
            return data.view(_PLAIN[stored.type]).view(stored.shape).to(dtype)
        rows = data.view(prod(stored.shape[:-1]), -1)
        blocks = GgufBlocks(rows, stored.type, dtype=dtype, input_bits=self._input_bits)
        return blocks if len(stored.shape) == 2 else blocks.dequantize().view(stored.shape)

    def _bytes(self, stored: StoredTensor) -> Tensor:
        """The stored bytes, uint8 [bytes]."""
        data = bytearray(stored.nbytes)
        try:
            with stored.file.open("rb", buffering=0) as file:
                file.seek(stored.offset)
                view, done = memoryview(data), 0
                while done < len(data):
                    count = file.readinto(view[done:])
                    if not count:
                        raise ModelLoadError(f"{stored.file.name} has become shorter while it was read")
                    done += count
        except OSError as error:
            raise ModelLoadError(f"{stored.file.name} cannot be read: {error.strerror}") from error
        return torch.frombuffer(data, dtype=torch.uint8)
