"""Types of settings, and how a setting says what it is for."""

from typing import Annotated, Literal

from msgspec import Meta

Auto = Literal["auto"]
PositiveInt = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0)]


def help_text(text: str) -> Meta:
    """What the command line shows for a field."""
    return Meta(description=text)
