"""An error of a value that is none of a few says which ones may be given, wherever the value stands."""

from typing import Annotated, Literal

import msgspec
import pytest

from troupellm.protocol.config.allowed_values import with_allowed_values
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError


class Inner(msgspec.Struct):
    level: Annotated[Literal["low", "high"], msgspec.Meta(description="how much")] | None = None


class Outer(msgspec.Struct):
    code: Literal[1, 2] = 1
    inner: Inner | None = None
    many: list[Inner] = []
    named: dict[str, Inner] = {}
    size: int = 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"code": 3}, "Invalid enum value 3 (allowed: 1, 2) - at `$.code`"),
        ({"inner": {"level": "mid"}}, "Invalid enum value 'mid' (allowed: 'high', 'low') - at `$.inner.level`"),
        ({"many": [{}, {"level": ""}]}, "Invalid enum value '' (allowed: 'high', 'low') - at `$.many[1].level`"),
        ({"named": {"a": {"level": "x"}}}, "Invalid enum value 'x' (allowed: 'high', 'low') - at `$.named[...].level`"),
        ({"size": "x"}, "Expected `int`, got `str` - at `$.size`"),
    ],
)
def test_the_allowed_values_are_named(given: dict[str, object], text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(given, Outer)
    assert with_allowed_values(caught.value, Outer) == text


def test_settings_of_an_engine_name_them() -> None:
    with pytest.raises(ConfigError, match=r"^quantization: .*'int3' \(allowed: .*'int8'.*\)$"):
        EngineConfig.from_flat({"quantization": "int3"})
