import gc
import threading
import time
from typing import ClassVar

import msgspec
import pytest

from troupellm.protocol.api.chat import ChatRequest, CompletionRequest
from troupellm.protocol.errors import InvalidRequest
from troupellm.server.base.body import INLINE_BYTES, BodyReader, read_body
from troupellm.server.base.errors import ClientGone, HttpError
from troupellm.server.base.json_body import MAX_CONTAINERS, MAX_STRINGS, decode_body, decode_json

pytestmark = pytest.mark.anyio


class Anything(msgspec.Struct):
    a: object = None


HUGE = 2_000_000
"""Parts of a body that a reader in quadratic time would not refuse within a test's limit of time."""


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"a":1',
        b"nonsense",
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * HUGE + b"}",
        b'{"a":1,"a":2}',
        b'{"a":{"b":[{"c":1,"d":2,"\\u0063":3}]}}',
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b"[" * HUGE,
        b'{"a":' * HUGE,
        nested(65),
    ],
    ids=lambda raw: raw[:24].decode("latin-1"),
)
def test_body_that_is_not_strict_json_is_refused(raw):
    with pytest.raises(InvalidRequest) as caught:
        decode_json(raw, Anything)
    assert caught.value.code == "invalid_json"


def test_body_accepts_colons_and_quotes_in_strings_and_64_levels():
    assert decode_json(b'{"a":"x\\":\\"y: \\\\","b":":"}', Anything).a == 'x":"y: \\'
    assert decode_json(nested(64), Anything).a is not None


@pytest.mark.parametrize(
    ("unit", "most", "what"),
    [
        (b"[],", MAX_CONTAINERS, "objects and lists"),
        (b"[{}],", MAX_CONTAINERS // 2, "objects and lists"),
        (b'"",', MAX_STRINGS, "strings"),
        (b'"\\\\",', 2 * MAX_STRINGS, "strings"),
        (b'{"k":"v"},', MAX_CONTAINERS, "objects and lists"),
    ],
)
def test_containers_and_strings_are_counted_before_decoding(monkeypatch, unit, most, what):
    made = []
    monkeypatch.setattr(msgspec.json, "decode", lambda raw: made.append(raw) or {})
    with pytest.raises(InvalidRequest, match=f"more than [0-9]+ {what}") as caught:
        decode_json(b'{"x":[' + unit * most + b'"",""]}', Anything)
    assert (caught.value.code, made) == ("invalid_json", [])


def test_brackets_and_quotes_inside_of_strings_count_for_nothing():
    raw = b'{"a":"' + b'[{\\"\\\\' * (2 * MAX_STRINGS) + b'"}'
    assert len(str(decode_json(raw, Anything).a)) == 8 * MAX_STRINGS


@pytest.mark.parametrize("unit", [b"[],", b'"a",', b'{"k":1},', b'"\\"",', b'":",'])
def test_decoding_takes_linear_time(unit):
    def seconds(count: int) -> float:
        raw = b'{"a":[' + unit * count + b"0]}"
        gc.disable()  # a collection takes as long as all that this process has
        try:
            began = time.thread_time()  # what others do on this machine does not count
            decode_json(raw, Anything)
            return time.thread_time() - began
        finally:
            gc.enable()

    short, long = (min(seconds(count) for _ in range(5)) for count in (20_000, 80_000))
    assert long < 12 * short + 0.05  # quadratic would be 16 times and far beyond the constant


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"a\ude00b", "a\ufffdb"),
        (rb"\ud83d\ud83d\ude00\ude00", "\ufffd\U0001f600\ufffd"),
        (rb"\\ud83d", r"\ud83d"),
        (rb"\\\uDBFF\n\udfff", "\\\ufffd\n\ufffd"),
    ],
)
def test_half_of_a_surrogate_pair_in_a_conversation_is_a_replacement_character(escaped, text):
    call = b'{"' + escaped + b'":"' + escaped + b'"}'
    body = decode_json(b'{"messages":[{"role":"assistant","tool_calls":' + call + b"}]}", ChatRequest)
    assert body.messages[0].tool_calls == {text: text}


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        (b'{"messages":[{"role":5}]}', "messages[0].role", "invalid_type"),
        (b"{}", "messages", "missing_required_parameter"),
        (b'{"messages":[],"n":1.5}', "n", "invalid_type"),
        (b'{"messages":[],"n":true}', "n", "invalid_type"),
        (b'{"messages":[],"logit_bias":{"x":1}}', "logit_bias", "invalid_type"),
        (b'{"messages":[],"logit_bias":{"5":"1"}}', "logit_bias", "invalid_type"),
        (b'{"messages":[],"cache_salt":""}', "cache_salt", "invalid_type"),
    ],
)
def test_type_errors_name_the_field(raw, param, code):
    with pytest.raises(InvalidRequest) as caught:
        decode_json(raw, ChatRequest)
    assert caught.value.param == param
    assert param.rpartition(".")[2] in caught.value.message
    assert code is None or caught.value.code == code


def test_null_and_unknown_fields_are_taken_as_absent():
    request = decode_json(
        b'{"prompt":[1,2],"stream":null,"stop":null,"tools":null,"frobnicate":{"x":1},"logit_bias":{"3":-100}}',
        CompletionRequest,
    )
    assert request.stream is None
    assert request.logit_bias == {3: -100.0}


class Noting(msgspec.Struct):
    """Notes the threads on which it is made."""

    a: str
    threads: ClassVar[list[int]] = []

    def __post_init__(self):
        self.threads.append(threading.get_ident())


@pytest.mark.parametrize(("size", "here"), [(INLINE_BYTES - 8, True), (INLINE_BYTES - 7, False)])
async def test_large_bodies_decode_on_a_thread(size, here):
    Noting.threads.clear()
    raw = b'{"a":"' + b"x" * size + b'"}'
    assert len((await decode_body(raw, Noting)).a) == size
    assert [thread == threading.get_ident() for thread in Noting.threads] == [here]


async def test_declared_length_over_the_cap_is_refused_unread(make_wire, make_exchange):
    wire = make_wire([b"x"])
    exchange = make_exchange(wire, headers={"content-type": "application/json", "content-length": "101"})
    with pytest.raises(HttpError) as caught:
        await read_body(exchange, limit=100, timeout=1)
    assert (caught.value.status, wire.taken) == (413, 0)


async def test_undeclared_length_is_refused_at_the_crossing_piece(make_wire, make_exchange):
    wire = make_wire([b"x" * 60] * 10)
    with pytest.raises(HttpError) as caught:
        await read_body(make_exchange(wire), limit=100, timeout=1)
    assert (caught.value.status, wire.taken) == (413, 2)


async def test_body_of_exactly_the_cap_is_read(make_wire, make_exchange):
    assert await read_body(make_exchange(make_wire([b"x" * 50] * 2)), limit=100, timeout=1) == b"x" * 100


async def test_slow_body_is_answered_408(make_wire, make_exchange):
    wire = make_wire([b"x"])
    wire.messages.pop()
    with pytest.raises(HttpError) as caught:
        await read_body(make_exchange(wire), limit=100, timeout=0.01)
    assert caught.value.status == 408


async def test_bytes_that_came_buy_time_for_the_rest(make_wire, make_exchange):
    wire = make_wire([b"x" * 30])
    wire.messages.pop()
    reader = BodyReader(make_exchange(wire), limit=100, timeout=0.01, slowest=1000.0)
    assert await reader.read() == b"x" * 30
    with pytest.raises(HttpError, match=r"within 0\.04 seconds"):
        await reader.read()


async def test_client_that_leaves_during_its_body_is_gone(make_wire, make_exchange):
    wire = make_wire([b"x"])
    wire.messages[-1] = {"type": "http.disconnect"}
    exchange = make_exchange(wire)
    with pytest.raises(ClientGone):
        await read_body(exchange, limit=100, timeout=1)
    assert exchange.gone


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json", "content-encoding": "br"},
    ],
)
async def test_wrong_media_type_or_encoding_is_415(make_wire, make_exchange, headers):
    with pytest.raises(HttpError) as caught:
        await read_body(make_exchange(make_wire(), headers=headers), limit=100, timeout=1)
    assert caught.value.status == 415


async def test_charset_parameter_is_fine(make_wire, make_exchange):
    exchange = make_exchange(make_wire([b"{}"]), headers={"content-type": "Application/JSON; charset=utf-8"})
    assert await read_body(exchange, limit=100, timeout=1) == b"{}"
