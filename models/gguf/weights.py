"""The tensors of a GGUF file under the names that layers ask for."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from troupellm.kernels.quantized import GgufBlocks, QuantizedWeight, Weight
from troupellm.models.gguf.config import EMBEDDING, ROPE_FACTORS
from troupellm.models.gguf.header import StoredTensor, read_header
from troupellm.models.steady_files import SteadyFiles
from troupellm.protocol.errors import ModelLoadError

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NEIGHBOURS = frozenset({"llama"})
"""Architectures whose queries and keys are stored for rotations of neighbours instead of halves."""
_ROTATED = (".attn_q.", ".attn_k.")


class GgufWeights:
    """A source of weights, as `Checkpoint` is one; blocks stay as they are stored."""

    def __init__(
        self, path: Path, dtype: torch.dtype, head_dim: int, taken: Callable[[int], None] = lambda _: None
    ) -> None:
        """
        Args:
            dtype: what plain tensors are converted to, and products are computed in.
            head_dim: of the model; where queries and keys are stored turned, its halves are put back in order.
            taken: called with the bytes of each tensor.

        Raises:
            ModelLoadError: the file cannot be read.
        """
        header = read_header(path)
        self._file, self._dtype, self._head_dim, self._taken = header.name, dtype, head_dim, taken
        self._tensors = dict(header.tensors)
        self._steady = SteadyFiles({tensor.file for tensor in header.tensors.values()})
        self._embedding = header.tensors.get(EMBEDDING)
        self._turned = header.metadata.get("general.architecture") in _NEIGHBOURS

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read one tensor.

        Raises:
            ModelLoadError: it is missing (or was taken before), or has another shape.
        """
        weight = self._weight(self._name(name), shape)
        return weight.dequantize(self._dtype) if isinstance(weight, QuantizedWeight) else weight

    def linear(self, name: str, shape: tuple[int, int]) -> Weight:
        """As `take`, of a layer's weight, in the blocks that are stored."""
        return self._weight(self._name(f"{name}.weight"), shape)

    def tied(self, embedding: Tensor) -> Weight:
        """The embedding once more, in its blocks if it has any."""
        if self._embedding is None or self._embedding.type in _PLAIN:
            return embedding
        return self._decoded(self._embedding)

    def stacked(self, name: str, shape: tuple[int, int, int], *, transposed: bool = False) -> list[Weight] | None:
        """There are none: models with experts are refused before."""
        return None

    def has(self, name: str) -> bool:
        """Whether there is such a tensor that was not taken yet."""
        return self._name(name) in self._tensors

    def ignore(self, name: str) -> None:
        """Accept a tensor that the model does not need."""
        self._tensors.pop(self._name(name), None)

    def ignore_all(self, prefix: str) -> None:
        """As `ignore`, of all tensors whose own names begin so."""
        for name in [name for name in self._tensors if name.startswith(prefix)]:
            del self._tensors[name]

    def finish(self) -> None:
        """Check that nothing is left over and that the files are those of the beginning.

        Raises:
            ModelLoadError: a tensor was not asked for, or a file has changed meanwhile.
        """
        self._steady.check()
        unknown = [name for name in self._tensors if name != ROPE_FACTORS]
        if unknown:
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            raise ModelLoadError(f"{self._file}: unknown tensor {unknown[0]:.80}{more}")

    def _name(self, name: str) -> str:
        """From the name in Hugging Face's format."""
        match = _LAYER.fullmatch(name)
        if match is not None:
            return f"blk.{match[1]}.{_INNER.get(match[2], match[2])}.{match[3]}"
        outer, _, last = name.rpartition(".")
        return f"{_OUTER.get(outer, outer)}.{last}"

    def _weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        stored = self._tensors.pop(name, None)
        if stored is None:
            raise ModelLoadError(f"{self._file}: tensor {name} is missing")
        if stored.shape != shape:
            raise ModelLoadError(f"{self._file}: tensor {name} has shape {list(stored.shape)}, expected {list(shape)}")
        weight = self._decoded(stored)
        if not self._turned or not any(mark in name for mark in _ROTATED):
            return weight
        order = torch.arange(shape[0]).view(-1, self._head_dim // 2, 2).transpose(1, 2).flatten()
        return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]

    def _decoded(self, stored: StoredTensor) -> Weight:
        data = self._bytes(stored)
        self._taken(data.nbytes)
        if stored.type in _PLAIN:
            return data.view(_PLAIN[stored.type]).view(stored.shape).to(self._dtype)
        rows = data.view(stored.shape[0] if len(stored.shape) > 1 else 1, -1)
        blocks = GgufBlocks(rows, stored.type, dtype=self._dtype)
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
