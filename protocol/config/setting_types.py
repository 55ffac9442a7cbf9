"""Types of settings, and how a setting says what it is for."""

from typing import Annotated, Final, Literal, get_args

from msgspec import Meta

Auto = Literal["auto"]
OnLoad = Literal["int8", "int8-weight-only", "int4", "fp8"]
"""How weights are quantized while they are read."""
StoredAs = Literal[
    "awq", "gptq", "compressed-tensors", "gguf", "quark", "mxfp4", "modelopt", "auto-round", "bitsandbytes"
]
"""How the weights of a checkpoint are quantized already."""
EventDetail = Literal["off", "keys", "tokens"]
"""How much the events of KV blocks tell."""
PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0)]


def help_text(text: str) -> Meta:
    """The text that the command line shows for a field."""
    return Meta(description=text)


STORED_AS: Final[tuple[StoredAs, ...]] = get_args(StoredAs)


def on_load_mode(quantization: OnLoad | StoredAs | None) -> OnLoad | None:
    """How weights are to be quantized while they are read; None where the setting only names what is stored."""
    return None if quantization in STORED_AS else quantization  # type: ignore[return-value]
