"""Finds a checkpoint's description of its quantized weights: a section of config.json, or a tool's file beside it.

Two places that contradict each other about the same weights are refused: one of them is wrong.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from troupellm.models.config.hf_config import FILE, ConfigReader, is_on
from troupellm.models.config.text_section import text_section
from troupellm.models.hub.json_file import read_object
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.errors import ModelLoadError

KEY, OLDER_KEY = "quantization_config", "compression_config"
"""The second is compressed-tensors' older name."""
FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json", "hf_quant_config.json")
"""AutoGPTQ and GPTQModel; AutoAWQ; AutoRound; ModelOpt."""
METHOD = "quant_method"
_NESTED = "quantization"
"""ModelOpt's settings within its file; in config.json, MLX's."""
_SAME_NAMES = {
    "w_bit": "bits",
    "q_group_size": "group_size",
    "ignore": "exclude_modules",
    "format": "checkpoint_format",
}
_COMPARED = (
    METHOD, "bits", "group_size", "sym", "desc_act", "zero_point", "version", "checkpoint_format", "dynamic",
    "modules_to_not_convert", "packing_format", "extra_config", "data_type", "act_bits", "quant_algo",
    "exclude_modules", "config_groups", "weight_block_size", "activation_scheme", "fmt", "quantized_layers",
)  # fmt: skip
"""Keys that change the meaning of the stored tensors."""
_LAYERS = "quantized_layers"
"""ModelOpt's settings by layer, which some of its versions write to its own file alone."""
_LISTS = ("modules_to_not_convert", "exclude_modules", "dynamic", "extra_config", "config_groups", _LAYERS)
"""Lists of which an empty one does not contradict another file."""
_SIGNS = (
    # key of a section without `quant_method`, and the method that writes it
    ("load_in_4bit", "bitsandbytes"), ("load_in_8bit", "bitsandbytes"), ("quant_algo", "modelopt"),
    ("config_groups", "compressed-tensors"), ("w_bit", "awq"), ("zero_point", "awq"), ("packing_format", "auto-round"),
    ("bits", "gptq"),
)  # fmt: skip
_METHOD_NAMES = {
    "intel/auto-round": "auto-round", "auto_round": "auto-round", "autoround": "auto-round",
    "modelopt_fp4": "modelopt", "modelopt_mxfp8": "modelopt", "modelopt_mixed": "modelopt",
}  # fmt: skip
_SAME_METHODS = {"modelopt": "fp8"}
"""ModelOpt's files of eight bits are also described in the older words."""


class _Place(NamedTuple):
    """A section and where it stands."""

    values: Mapping[str, Any]
    file: str
    prefix: str

    def name_of(self, key: str) -> str:
        return f"{self.file}: {self.prefix}{key}"


def find_section(folder: Path, reader: ConfigReader) -> tuple[ConfigReader, tuple[str, ...]]:
    """The config with its quantization section under `quantization_config`, with `quant_method`, and notes.

    Args:
        folder: of the model.
        reader: its config.json.

    Raises:
        ModelLoadError: a file is damaged, or two places disagree.
    """
    packed = reader.section(_NESTED)
    if packed.is_on("bits") and not packed.is_on(METHOD) and not reader.section(KEY).is_on(METHOD):
        raise reader.refuse(_NESTED, "is the packing of MLX, which is not read", hint="serve the original checkpoint")
    places, notes = _of_config(reader), list[str]()
    for file in FILES:
        check_file(folder / file)
        if not (folder / file).is_file():
            continue
        place = _of_file(file, read_object(folder / file))
        if place is None:
            notes.append(f"{file} is not used: it does not say how these weights are quantized")
        else:
            places.append(place)
    if not places:
        return reader.without(KEY).without(OLDER_KEY), tuple(notes)
    first, *others = places
    for other in others:
        _check_same(first, other)
    layers = next((place.values[_LAYERS] for place in places if _LAYERS in place.values), None)
    whole = first if layers is None else first._replace(values={**first.values, _LAYERS: layers})
    return reader.without(OLDER_KEY).with_section(KEY, *whole), tuple(notes)


def _of_config(reader: ConfigReader) -> list[_Place]:
    found = []
    for home in (reader, text_section(reader)):
        prefix = home.prefix
        for key in (KEY, OLDER_KEY):
            values = home.section(key).values
            if values:
                method = _method(values)
                named = values if method is None else {**values, METHOD: method}
                found.append(_Place(_usual(named), FILE, f"{prefix}{key}."))
    return [place for place in found if not _switched_off(place.values)]


def _of_file(file: str, values: dict[str, Any]) -> _Place | None:
    """The section of a file; None if it is about something else, such as another runtime's conversion."""
    inner, prefix = values.get(_NESTED), ""
    if isinstance(inner, dict) and not is_on(values.get(METHOD)):  # ModelOpt
        values = {METHOD: "modelopt", "producer": values.get("producer"), **inner}
        prefix = f"{_NESTED}."
    method = _method(values)
    return None if method is None else _Place(_usual({**values, METHOD: method}), file, prefix)


def _method(values: Mapping[str, Any]) -> str | None:
    if is_on(values.get(METHOD)):
        return str(values[METHOD])
    return next((method for key, method in _SIGNS if key in values), None)


def _usual(values: Mapping[str, Any]) -> dict[str, Any]:
    method = values.get(METHOD)
    return {**values, METHOD: _METHOD_NAMES.get(method, method)} if isinstance(method, str) else dict(values)


def _switched_off(values: Mapping[str, Any]) -> bool:
    """bitsandbytes' settings of a model that is stored plainly."""
    return values.get(METHOD) == "bitsandbytes" and not (
        is_on(values.get("load_in_4bit")) or is_on(values.get("load_in_8bit"))
    )


def _check_same(first: _Place, other: _Place) -> None:
    ours, theirs = _compared(first), _compared(other)
    for key in _COMPARED:
        if key not in ours or key not in theirs:
            continue
        (name, value), (other_name, other_value) = ours[key], theirs[key]
        one, two = _comparable(value), _comparable(other_value)
        if one != two and not (key in _LISTS and None in (one, two)):
            raise ModelLoadError(
                f"{other.name_of(other_name)} is {_shown(other_value)}, but {first.name_of(name)} is {_shown(value)}",
                hint="remove or correct the file that is not about these weights",
            )


def _compared(place: _Place) -> dict[str, tuple[str, Any]]:
    """By the usual names of keys: the section's own name, and the value."""
    return {_SAME_NAMES.get(key, key): (key, value) for key, value in place.values.items() if value is not None}


def _comparable(value: Any) -> Any:
    """Texts without their case, lists without their order; everything that is off is the same."""
    if not is_on(value):
        return None
    if isinstance(value, list):
        return sorted(json.dumps(item, sort_keys=True) for item in value)
    if isinstance(value, str):
        return _SAME_METHODS.get(value.lower(), value.lower())
    return value


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
