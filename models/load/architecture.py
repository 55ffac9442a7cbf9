"""Reads from config.json the architecture and its quantization section, which has several possible places."""

import re
from pathlib import Path
from typing import NamedTuple

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.encoder_config import ENCODERS, OTHER_ENCODERS
from troupellm.models.config.hf_config import ConfigReader, architecture_of, ignored_rope_keys, is_on
from troupellm.models.config.quantization_section import find_section
from troupellm.models.config.spellings import SPELLINGS
from troupellm.models.config.text_part import FLAT, NESTED, is_wrapper, text_document
from troupellm.models.families.registry import BARE, CLASSIFIERS, FAMILIES, describe_decoder
from troupellm.models.hub.errors import plain_name
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink

_KEY = "architectures"
_BY_TYPE = {
    "gemma3_text": "Gemma3ForCausalLM", "gemma4_text": "Gemma4ForCausalLM", "llama4_text": "Llama4ForCausalLM",
}  # fmt: skip
"""Types whose architectures do not begin like them."""
_HEAD = re.compile(r"(Text)?(Model|For[A-Z]\w*)$")


class ModelConfigFile(NamedTuple):
    """A config.json as it is served."""

    reader: ConfigReader
    """Names one architecture; its quantization section is the one that holds for the weights."""
    notes: tuple[str, ...]
    """Notes for the load log."""


def read_config(folder: Path) -> ModelConfigFile:
    """Read config.json, or the metadata of a GGUF file.

    Raises:
        ModelLoadError: a file is missing or damaged, names architectures of two families or none, or disagrees with
            another file about the quantization.
    """
    reader = ConfigReader.load(folder)
    if is_gguf(folder):
        return ModelConfigFile(reader, ())
    named, notes = settle_architecture(reader)
    quantized, more = find_section(folder, named)
    served, part = served_part(quantized)
    return ModelConfigFile(served, (*notes, *more, *part, *ignored_rope_keys(served)))


def open_config(folder: Path, progress: ProgressSink) -> ConfigReader:
    """Read config.json and write its notes to the load log."""
    reader, notes = read_config(folder)
    for note in notes:
        progress(LoadProgress(phase="resolve", detail=note))
    return reader


def describe_model(folder: Path) -> DecoderConfig:
    """Read and check config.json of a decoder.

    Raises:
        ModelLoadError: no such file, an architecture that no family claims, or a wrong value.
    """
    return describe_decoder(read_config(folder).reader)


def settle_architecture(reader: ConfigReader) -> tuple[ConfigReader, tuple[str, ...]]:
    """The same config with one architecture: the first that has a family, else the first, else by `model_type`.

    Raises:
        ModelLoadError: names of two families, or none and an unknown type.
    """
    names = reader.values.get(_KEY)
    if not is_on(names):
        return _by_type(reader)
    if not isinstance(names, list) or len(names) > 16 or not all(isinstance(name, str) for name in names):
        raise reader.refuse(_KEY, "must be a list of names")
    families = {name: family for name in names if (family := _family_of(_usual(name))) is not None}
    if len(set(families.values())) > 1:
        raise reader.refuse(_KEY, "must name one family", hint="leave only the name that the weights are for")
    name, notes = next(iter(families), names[0]), list[str]()
    if len(names) > 1:
        name = name if families else _known_elsewhere(names) or name
        notes.append(f"config.json: {_KEY}: {plain_name(name)} is served, of {len(names)} names")
    if (spelling := SPELLINGS.get(name)) is None:
        return reader.with_values(architectures=[name]), tuple(notes)
    notes.append(f"config.json: {_KEY}: {name} is served as {spelling.architecture}")
    moved = {ours: reader.values[theirs] for theirs, ours in spelling.renamed if reader.has(theirs)}
    return reader.with_defaults(**moved).with_values(architectures=[spelling.architecture]), tuple(notes)


def served_part(reader: ConfigReader) -> tuple[ConfigReader, tuple[str, ...]]:
    """Of a checkpoint with parts for images or sound the part for text, as a config of its own; any other as it is.

    Raises:
        ModelLoadError: the text part is missing, or of an unknown type.
    """
    wrapper = architecture_of(reader)
    if not is_wrapper(wrapper):
        return reader, ()
    text, kind = text_document(reader)
    name = _own_name(kind) or _causal_architecture(kind)
    if name is None:
        raise text.refuse("model_type", "is no decoder that is served", hint=f"it is the text part of {wrapper}")
    note = f"config.json: {_KEY}: of {wrapper} the text part is served, as {name}; images and sound are not"
    return text.with_values(architectures=[name]), (note,)


def asks_transformers(reader: ConfigReader) -> bool:
    """True if `read_config` will ask the package transformers, whose import takes seconds."""
    names = reader.values.get(_KEY)
    if is_on(names):
        listed = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        known = next((name for name in listed if _family_of(_usual(name))), None)
        if known is not None and is_wrapper(known):
            return _own_name(text_document(reader.with_values(architectures=[known]))[1]) is None
        return len(listed) > 1 and known is None
    kind = reader.values.get("model_type")
    return isinstance(kind, str) and bool(kind) and _own_name(kind) is None


def _usual(name: str) -> str:
    return SPELLINGS[name].architecture if name in SPELLINGS else name


def _family_of(architecture: str) -> str | None:
    """The name without the kind of head; None where there is no family."""
    homes = (FAMILIES, BARE, CLASSIFIERS, ENCODERS, OTHER_ENCODERS, NESTED, FLAT)
    known = any(architecture in names for names in homes)
    return _HEAD.sub("", architecture) if known else None


def _known_elsewhere(names: list[str]) -> str | None:
    """The first one that transformers runs."""
    from troupellm.models.transformers_backend import describe

    return next((name for name in names if describe.knows_name(_usual(name))), None)


def _by_type(reader: ConfigReader) -> tuple[ConfigReader, tuple[str, ...]]:
    kind = reader.values.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise reader.refuse(_KEY, "must name one architecture", hint="write the name that transformers has for it")
    name = _own_name(kind) or _causal_architecture(kind)
    if name is None:
        raise reader.refuse("model_type", f"is not known, and {_KEY} is missing", hint=f"add {_KEY} to config.json")
    note = f"config.json: {_KEY} is missing; model_type {kind} is served as {name}"
    return reader.with_values(architectures=[name]), (note,)


def _causal_architecture(kind: str) -> str | None:
    from troupellm.models.transformers_backend.describe import causal_architecture

    return causal_architecture(kind)


def _own_name(kind: str) -> str | None:
    """The architecture of a family with a head, of an encoder, or around a text part, whose name is the type's."""
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    wanted = kind.replace("_", "").replace("-", "").lower()
    wrappers = (*NESTED, *FLAT)
    for names, ending in ((FAMILIES, "ForCausalLM"), (ENCODERS, "Model"), (wrappers, "ForConditionalGeneration")):
        for name in names:
            if name.endswith(ending) and name.removesuffix(ending).replace("_", "").lower() == wanted:
                return name
    return None
