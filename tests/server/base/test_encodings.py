import gzip
import json
import tracemalloc
import zlib

import pytest
import zstandard

from troupellm.protocol.api.chat import CompletionRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import MAX_MEMBERS, decode, encoding_of, is_large, read_body
from troupellm.server.base.errors import HttpError
from troupellm.server.base.json_body import decode_json

pytestmark = pytest.mark.anyio

LIMIT = 2**20
BODY = json.dumps({"prompt": "héllo " * 1000}).encode()


def packed(encoding: str, plain: bytes) -> bytes:
    return gzip.compress(plain) if encoding == "gzip" else zstandard.ZstdCompressor(write_checksum=True).compress(plain)


both = pytest.mark.parametrize("encoding", ["gzip", "zstd"])


@both
@pytest.mark.parametrize("plain", [b"", b"x", BODY, b"\0" * LIMIT], ids=["empty", "letter", "body", "limit"])
def test_a_body_comes_back_as_it_was(encoding, plain):
    assert decode(packed(encoding, plain), encoding, LIMIT) == plain


@both
def test_streams_behind_each_other_are_one_body(encoding):
    assert decode(packed(encoding, b"one ") + packed(encoding, b"two"), encoding, LIMIT) == b"one two"
    with pytest.raises(InvalidRequest):
        decode(packed(encoding, b"x") * (MAX_MEMBERS + 1), encoding, LIMIT)


@both
def test_a_bomb_is_refused_before_it_is_made(encoding):
    bomb = packed(encoding, b"\0" * (64 * 2**20))
    tracemalloc.start()
    with pytest.raises(HttpError) as caught:
        decode(bomb, encoding, LIMIT)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")
    assert most < 4 * LIMIT


def test_a_window_larger_than_the_webs_is_refused():
    wide = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27))
    stream = wide.compressobj()
    with pytest.raises(InvalidRequest):
        decode(stream.compress(BODY) + stream.flush(), "zstd", LIMIT)


@both
def test_damaged_bytes_are_refused(encoding):
    whole = packed(encoding, BODY)
    cuts = [whole[:length] for length in range(len(whole))]
    for raw in (*cuts, whole + b"xx", b"nonsense", b"{}", whole[:20] + b"\xff\xff\xff" + whole[23:]):
        with pytest.raises(InvalidRequest) as caught:
            decode(raw, encoding, LIMIT)
        assert caught.value.code == "invalid_encoding"


def test_raw_deflate_is_not_gzip():
    with pytest.raises(InvalidRequest):
        decode(zlib.compress(BODY), "gzip", LIMIT)


@pytest.mark.parametrize(
    ("header", "name"),
    [(None, None), ("identity", None), ("gzip", "gzip"), (" GZIP ", "gzip"), ("x-gzip", "gzip"), ("zstd", "zstd")],
)
def test_the_header_names_an_encoding(header, name):
    assert encoding_of(header) == name


@pytest.mark.parametrize("header", ["br", "deflate", "gzip, zstd", "compress", "zstd;q=1", ""])
def test_another_encoding_is_refused_with_those_that_are_taken(header):
    if not header:
        assert encoding_of(header) is None
        return
    with pytest.raises(HttpError) as caught:
        encoding_of(header)
    assert caught.value.status == 415
    assert (b"accept-encoding", b"gzip, zstd") in caught.value.headers


@both
async def test_a_compressed_body_is_read_under_both_limits(make_wire, make_exchange, encoding):
    raw = packed(encoding, BODY)
    headers = {"content-type": "application/json", "content-encoding": encoding, "content-length": str(len(raw))}
    exchange = make_exchange(make_wire([raw[:10], raw[10:]]), headers=headers)
    read = await read_body(exchange, limit=len(BODY), timeout=1.0)
    assert decode_json(read, CompletionRequest).prompt == "héllo " * 1000
    assert exchange.body_bytes == len(BODY)
    for limit in (len(BODY) - 1, len(raw) - 1):
        with pytest.raises(HttpError) as caught:
            await read_body(make_exchange(make_wire([raw]), headers=headers), limit=limit, timeout=1.0)
        assert caught.value.status == 413


async def test_a_small_body_of_much_text_is_large(make_wire, make_exchange):
    raw = packed("gzip", b'{"prompt":"' + b"a" * 100_000 + b'"}')
    headers = {"content-type": "application/json", "content-encoding": "gzip", "content-length": str(len(raw))}
    exchange = make_exchange(make_wire([raw]), headers=headers)
    assert not is_large(exchange)
    await read_body(exchange, limit=LIMIT, timeout=1.0)
    assert is_large(exchange)
