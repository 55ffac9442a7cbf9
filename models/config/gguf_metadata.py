"""The metadata of a GGUF file about its architecture, with a note of which keys were read."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.errors import why
from troupellm.models.hub.gguf_header import Header
from troupellm.protocol.errors import ModelLoadError

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_HARMLESS = frozenset(
    {
        "vocab_size", "tensor_data_layout", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
        "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
"""Keys that change nothing where an architecture does not read them."""
_SIZES = {"ssm.": ".ssm_", "expert_shared_feed_forward_length": "_shexp."}
"""Keys, by how they begin, that change nothing where no tensor has such a name: Granite 4 without recurrent layers is
written by the converter of those that have some."""
_USUAL = {"attention.causal": True, "rope.scaling.attn_factor": 1.0, "rope.scaling.factor": 1.0}
"""The value of a key that changes nothing, where it is not zero."""


class NotedKeys(Mapping[str, Any]):
    """A mapping that remembers which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Metadata:
    """The keys under the name of a file's architecture.

    Attributes:
        header: of the file.
        reader: of those keys, without the architecture's name; an array with one number for all layers reads as that
            number.
    """

    def __init__(self, header: Header, architecture: str) -> None:
        self.header, self._prefix = header, f"{architecture}."
        own = {key.removeprefix(self._prefix): value for key, value in header.metadata.items() if self._owns(key)}
        self._whole = own
        self._noted = NotedKeys({key: _single(value) for key, value in own.items()})
        self.reader = ConfigReader(self._noted, self._prefix, file=header.name)

    def _owns(self, key: str) -> bool:
        return key.startswith(self._prefix)

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def numbers(self, name: str, length: int) -> list[float]:
        """A small float32 tensor.

        Raises:
            ModelLoadError: it is missing or cannot be read, or has another type or length, or holds no numbers above 0.
        """
        tensor = self.header.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.header.name}: tensor {name} is missing")
        if tensor.type != "F32" or tensor.shape != (length,):
            raise ModelLoadError(
                f"{self.header.name}: tensor {name} has type {tensor.type} and shape {list(tensor.shape)}, "
                f"expected F32 and [{length}]"
            )
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset)
                found = array("f", file.read(tensor.nbytes)).tolist()
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self.header.name}: tensor {name} cannot be read: {why(error)}") from error
        if len(found) != length or not all(0 < number < 1e6 for number in found):
            raise ModelLoadError(f"{self.header.name}: tensor {name} must hold {length} numbers above 0")
        return found

    def counts(self, key: str, length: int) -> list[int]:
        """An array with one whole number per layer, or one number for all of them.

        Raises:
            ModelLoadError: it is missing or holds something else.
        """
        self._noted.read.add(key)
        found = self._whole.get(key)
        if type(found) is int:
            found = [found] * length
        if not isinstance(found, list | array) or len(found) != length or any(type(each) is not int for each in found):
            raise self.reader.refuse(key, f"must be an array of {length} whole numbers")
        return list(found)

    def flags(self, key: str, length: int) -> list[bool] | None:
        """An array with one flag per layer; None where there is none."""
        self._noted.read.add(key)
        found = self._whole.get(key)
        if found is None:
            return None
        if not isinstance(found, list | array) or len(found) != length or any(flag not in (0, 1) for flag in found):
            raise self.reader.refuse(key, f"must be an array of {length} flags")
        return [bool(flag) for flag in found]

    def refuse_unread(self) -> None:
        """Check that every key was read, or says that nothing is different.

        Raises:
            ModelLoadError: one was not.
        """
        for key, value in self._whole.items():
            harmless = key in _HARMLESS or _is_off(key, value) or self._is_size_of_nothing(key)
            if key not in self._noted.read and not harmless:
                raise ModelLoadError(f"{self.header.name}: {self._prefix}{key} is not supported, got {value!r:.80}")

    def _is_size_of_nothing(self, key: str) -> bool:
        marks = [mark for begin, mark in _SIZES.items() if key.startswith(begin)]
        return bool(marks) and not any(marks[0] in name for name in self.header.tensors)


def _is_off(key: str, value: Any) -> bool:
    if isinstance(value, list | array):
        return not any(value)
    return value == _USUAL[key] if key in _USUAL else value in (0, False, "none")


def _single(value: Any) -> Any:
    """An array of equal numbers as that number."""
    return value[0] if isinstance(value, array) and len(set(value)) == 1 else value
