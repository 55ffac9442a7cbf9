"""From a checkpoint's config.json to the description of a decoder.

The rule for keys, here and in quantization files: a key that cannot change the result is ignored and logged once; a key
that can change it and is not supported is refused, with file, key and value. null and "" mean that a key is missing;
0, false and empty lists turn a feature off.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from troupellm.models.config.decoder_config import Activation, DecoderConfig, LayerShape, QKNorm, RopeConfig
from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.json_file import read_object
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import ModelLoadError

FILE = "config.json"
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
TEXT_PART = "text_part_of"
"""The key that the text part of a checkpoint has beside its own ones: the architecture around it."""
MOST = 2**31 - 1
"""A greater whole number is taken for damage."""
_MOST_OF = {"num_hidden_layers": 10_000, "n_layers": 10_000, "block_count": 10_000}
"""Limits of keys that set the length of lists, which are built before any weight is looked for."""
ROPES = ("default", "mrope", "linear", "dynamic", "llama3", "yarn", "longrope", "su")
_ROPE_KEYS = frozenset(
    {
        "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
        "attention_factor", "attn_factor", "extrapolation_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
        "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor", "finetuned",
        "mrope_section", "mrope_interleaved",
    }
)  # fmt: skip
"""Others may change the rotation, and are refused. Sections are for images: in text all of them have one position."""
_OF_SECTIONS = "interleaved"
"""The order of sections in Qwen3-Omni's files; without sections it may mean something else."""


class ConfigReader:
    """Typed access to config.json or equivalent metadata; refusals are ModelLoadErrors naming the file and the key."""

    def __init__(
        self,
        values: Mapping[str, Any],
        prefix: str = "",
        file: str = FILE,
        elsewhere: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        """
        Args:
            prefix: of keys, in messages.
            file: its name, in messages.
            elsewhere: file and prefix of the sections that stand in another place, by their keys.
        """
        self.values = values
        self._prefix, self._file, self._elsewhere = prefix, file, elsewhere or {}

    @classmethod
    def load(cls, folder: Path) -> "ConfigReader":
        """Read `folder`/config.json, or the metadata of a GGUF file."""
        if is_gguf(folder):
            from troupellm.models.config.gguf_documents import document  # which is read by this class itself

            return cls(document(folder, FILE), file=folder.name)
        check_file(folder / FILE)
        try:
            return cls(read_object(folder / FILE))
        except FileNotFoundError:
            raise ModelLoadError(f"{FILE} is missing", hint="give a folder in Hugging Face's format") from None

    def with_defaults(self, **defaults: Any) -> "ConfigReader":
        """The reader with values for missing keys; an explicit null stays null."""
        return self.like({**defaults, **self.values})

    def with_values(self, **values: Any) -> "ConfigReader":
        """The reader with other values for some keys."""
        return self.like({**self.values, **values})

    def with_section(self, key: str, values: Mapping[str, Any], file: str, prefix: str) -> "ConfigReader":
        """The reader with a section from another file, or from under another key."""
        places = {**self._elsewhere, key: (file, prefix)}
        return ConfigReader({**self.values, key: values}, self._prefix, self._file, places)

    def with_section_of(self, key: str, other: "ConfigReader") -> "ConfigReader":
        """The reader with another one's section, if that one has it."""
        section = other.section(key)
        return self.with_section(key, section.values, section._file, section._prefix) if section.values else self

    def place_of(self, key: str) -> str:
        """File and whole key, for messages."""
        return f"{self._file}: {self._prefix}{plain_name(key)}"

    @property
    def prefix(self) -> str:
        """Of its keys, in messages."""
        return self._prefix

    def has(self, key: str) -> bool:
        """True if the key has a value, which may be 0 or false."""
        return not _is_missing(self.values.get(key))

    def is_on(self, key: str) -> bool:
        """True if the key has a value that turns something on: not 0, false or empty."""
        return is_on(self.values.get(key))

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`, which may be written as 50.0; null counts as missing."""
        value = whole(self._value(key, default))
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"must be an integer of at least {least}")
        if value > (most := _MOST_OF.get(key, MOST)):
            raise self.refuse(key, f"must be an integer of at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._value(key, default)
        if not _is_positive(value):
            raise self.refuse(key, "must be a number above 0")
        return float(value)

    def optional(self, key: str) -> float | None:
        """A number above zero, or None where it is missing or 0."""
        return self.number(key) if self.is_on(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """true or false; 0 is false."""
        value = self._value(key, default)
        if value == 0 and not isinstance(value, bool):
            return False
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(key, f"must be one of {', '.join(allowed)}")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers above zero."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != length:
            raise self.refuse(key, f"must be a list of {length} numbers")
        if not all(map(_is_positive, value)):
            raise self.refuse(key, "must hold numbers above 0")
        return tuple(float(item) for item in value)

    def section(self, key: str) -> "ConfigReader":
        """A nested object; empty when it is missing, null, false or empty."""
        value = self.values.get(key)
        value = value if is_on(value) else {}
        if not isinstance(value, dict):
            raise self.refuse(key, "must be an object")
        file, prefix = self._elsewhere.get(key, (self._file, f"{self._prefix}{plain_name(key)}."))
        return ConfigReader(value, prefix, file)

    def without(self, key: str) -> "ConfigReader":
        """The reader without the key."""
        return self.like({name: value for name, value in self.values.items() if name != key})

    def refuse(self, key: str, wanted: str, hint: str = "") -> ModelLoadError:
        """The error for a key with a wrong value."""
        got = json.dumps(self.values.get(key), default=str)[:80]
        return ModelLoadError(f"{self.place_of(key)} {wanted}, got {got}", hint=hint)

    def like(self, values: Mapping[str, Any]) -> "ConfigReader":
        """Other values in the same place."""
        return ConfigReader(values, self._prefix, self._file, self._elsewhere)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if not _is_missing(value):
            return value
        if default is None:
            raise ModelLoadError(f"{self.place_of(key)} is missing")
        return default


def is_on(value: Any) -> bool:
    """True if a value turns something on: not null, 0, false, "" or empty."""
    return not (value is None or value == 0 or value in ("", [], {}))


def whole(value: Any) -> Any:
    """A number such as 50.0 as the whole number that it is; everything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_missing(value: Any) -> bool:
    return value is None or value == ""


def _is_positive(value: Any) -> bool:
    """A number above zero that a float can hold: JSON has whole numbers of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def architecture_of(reader: ConfigReader) -> str:
    """The name of the model class that the checkpoint was made for."""
    names = reader.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise reader.refuse("architectures", "must name one architecture")
    return names[0]


def decoder_config(
    reader: ConfigReader,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QKNorm = "none",
    windows: tuple[int | None, ...] = (),
    activation: Activation | None = None,
    rotary: float | None = None,
    rope: RopeConfig | None = None,
) -> DecoderConfig:
    """Build a description from the keys that all families share, and from the family's own arguments.

    Args:
        activation: of the gate; without it `hidden_act` is read, and must be a SiLU.
        rotary: share of a head that is rotated if `partial_rotary_factor` is not set; without it, all of the head.
        windows: per layer; without it, none has one.
        rope: the rotation of all layers; read when not given.

    Raises:
        ModelLoadError: a value is missing, wrong, or asks for something that is not built.
    """
    if not reader.flag("is_causal", True):
        raise reader.refuse("is_causal", "must be true: attention that looks ahead is not supported")
    if activation is None:
        activation = ACTIVATIONS[reader.choice("hidden_act", ("silu", "swish"), "silu")]
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if not reader.is_on("head_dim") and hidden_size % num_heads:
        raise reader.refuse("hidden_size", f"must be a multiple of num_attention_heads ({num_heads})")
    head_dim = reader.integer("head_dim") if reader.is_on("head_dim") else hidden_size // num_heads
    if head_dim % 2:
        raise reader.refuse("head_dim", "must be even")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    windows = windows or (None,) * reader.integer("num_hidden_layers")
    rotary_dim = head_dim if rotary is None else _rotary_dim(reader, head_dim, rotary)
    if rope is None:
        rope = rope_config(reader, rotary_dim, whole=rotary is None)
    part, size = None if rotary_dim == head_dim else rotary_dim, reader.integer("intermediate_size")
    shape = LayerShape(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=rope, intermediate_size=size
    )
    dtype_key = "dtype" if reader.has("dtype") else "torch_dtype"
    return DecoderConfig(
        architecture=architecture_of(reader),
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(msgspec.structs.replace(shape, window=window, rotary_dim=part) for window in windows),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=_longest(reader),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        checkpoint_dtype=reader.choice(dtype_key, DTYPES, "float32"),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        activation=activation,
        text_part=reader.has(TEXT_PART),
    )


def layer_windows(reader: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` where there is one, else the same for all."""
    num_layers = reader.integer("num_hidden_layers")
    kinds = reader.values.get("layer_types")
    if not is_on(kinds):
        return (window,) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise reader.refuse("layer_types", f"must be a list of {num_layers} names")
    known = {"full_attention": None, "sliding_attention": window}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise reader.refuse("layer_types", f"may hold {' and '.join(known)}")
    if window is None and "sliding_attention" in kinds:
        raise reader.refuse("sliding_window", "must be set, since layer_types names sliding_attention")
    return tuple(known[kind] for kind in kinds)


def _longest(reader: ConfigReader) -> int:
    """Tokens of a sequence; with `dual_chunk_attention_config` those of one chunk, beyond which others are attended to
    by changed positions: that is not built."""
    longest, chunks = reader.integer("max_position_embeddings"), reader.section("dual_chunk_attention_config")
    if not chunks.values:
        return longest
    size, shared = chunks.integer("chunk_size", 8192), chunks.integer("local_size", 1024, least=0)
    if shared >= size:
        raise chunks.refuse("local_size", f"must be below chunk_size ({size})")
    return min(longest, size - shared)


def ignored_rope_keys(reader: ConfigReader) -> list[str]:
    """Notes on unknown keys for the rotation that are off."""
    return [
        f"{section.place_of(key)} is ignored: it is off"
        for section in (reader.section("rope_parameters"), reader.section("rope_scaling"))
        for key in section.values
        if key not in _ROPE_KEYS and section.has(key) and not section.is_on(key)
    ]


def _rotary_dim(reader: ConfigReader, head_dim: int, default: float) -> int:
    """The number of a head's values that are rotated."""
    scaling = reader.section("rope_parameters")
    home = scaling if scaling.has("partial_rotary_factor") else reader
    size = int(head_dim * home.number("partial_rotary_factor", default))
    if not 0 < size <= head_dim or size % 2:
        raise home.refuse("partial_rotary_factor", f"must make an even part of head_dim ({head_dim})")
    return size


def rope_config(reader: ConfigReader, rotary_dim: int, *, whole: bool = True) -> RopeConfig:
    """Rotary embedding from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files.

    Args:
        rotary_dim: values of a head that are rotated.
        whole: refuse a file that asks for a part of the head.
    """
    scaling = rope_section(reader)
    theta = scaling.number("rope_theta") if scaling.has("rope_theta") else reader.number("rope_theta", 10000.0)
    if whole and (
        scaling.number("partial_rotary_factor", 1.0) != 1.0 or reader.number("partial_rotary_factor", 1.0) != 1.0
    ):
        raise reader.refuse("partial_rotary_factor", "must be 1.0")
    return scaled_rope(reader, scaling, theta, rotary_dim)


def rope_section(reader: ConfigReader) -> ConfigReader:
    """`rope_parameters`, or `rope_scaling` of older files."""
    newer = reader.section("rope_parameters")
    if not newer.values:
        return reader.section("rope_scaling")
    check_older_rope(reader, newer)
    return newer


def check_older_rope(reader: ConfigReader, newer: ConfigReader) -> None:
    """Check a `rope_scaling` that stands beside the newer `rope_parameters`; many model cards advise to add it.

    Raises:
        ModelLoadError: it contradicts `newer`.
    """
    for key, value in reader.section("rope_scaling").values.items():
        names = ("rope_type", "type") if key in ("rope_type", "type") else (key,)
        if all(newer.values.get(name) != value for name in names):
            raise reader.refuse("rope_scaling", "must say the same as rope_parameters, or be removed")


def scaled_rope(reader: ConfigReader, scaling: ConfigReader, theta: float, rotary_dim: int) -> RopeConfig:
    """A rotary embedding whose scaling is in a section of its own."""
    key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.choice(key, ROPES, "default")
    known = _ROPE_KEYS | ({_OF_SECTIONS} if scaling.is_on("mrope_section") else set())
    unknown = next((name for name in scaling.values if name not in known and scaling.is_on(name)), None)
    if unknown is not None:
        raise scaling.refuse(unknown, "is not supported")
    if scaling.number("extrapolation_factor", 1.0) != 1.0:
        raise scaling.refuse("extrapolation_factor", "must be 1.0")
    if kind in ("default", "mrope"):  # in text, all sections of mrope have the same position
        return RopeConfig(theta=theta)
    kind = "longrope" if kind == "su" else kind
    longest = reader.integer("max_position_embeddings")
    home = reader if reader.has("original_max_position_embeddings") else scaling
    original = home.integer("original_max_position_embeddings", longest) if kind != "dynamic" else longest
    factor = scaling.number("factor", longest / original if kind in ("yarn", "longrope") else None)
    if factor * original > MOST:
        raise scaling.refuse("factor", f"must stretch {original} positions to at most {MOST}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=scaling.optional("attention_factor"),
        yarn_attn_factor=scaling.number("attn_factor", 1.0),
        low_freq_factor=scaling.number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=scaling.number("high_freq_factor") if kind == "llama3" else 4.0,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.number("mscale") if scaling.values.get("mscale") else 0.0,
        mscale_all_dim=scaling.number("mscale_all_dim") if scaling.values.get("mscale_all_dim") else 0.0,
        truncate=scaling.flag("truncate", True),
        short_factor=scaling.numbers("short_factor", rotary_dim // 2) if kind == "longrope" else (),
        long_factor=scaling.numbers("long_factor", rotary_dim // 2) if kind == "longrope" else (),
    )
