import msgspec
import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.query import decode_query


class Query(msgspec.Struct):
    limit: int = 20
    after: str | None = None
    stream: bool = False
    include: list[str] | None = None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", Query()),
        (b"limit=3&after=a%20b", Query(limit=3, after="a b")),
        (b"include[]=x&include[]=y", Query(include=["x", "y"])),
        (b"include=x", Query(include=["x"])),
        (b"stream=true", Query(stream=True)),
        (b"unknown=1&another", Query()),
    ],
)
def test_a_query_becomes_a_struct(raw, expected):
    assert decode_query(raw, Query) == expected


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"limit=x", "limit"),
        (b"limit=1&limit=2", "limit"),
        (b"limit=", "limit"),
        (b"after=%ff", None),
        (b"after=\xff", None),
        (b"&".join(b"a%d=1" % number for number in range(65)), None),
    ],
)
def test_a_wrong_query_is_refused_by_name(raw, param):
    with pytest.raises(InvalidRequest) as caught:
        decode_query(raw, Query)
    assert caught.value.param == param
