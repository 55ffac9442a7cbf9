"""Reading of replies: HTTP framing, events, and the judgement of a stream."""

import asyncio
import json
import ssl
from urllib.parse import urlsplit

import pytest

from troupellm.load_tests.client import client
from troupellm.load_tests.client.http1 import ProtocolError, ResponseParser
from troupellm.load_tests.client.records import RequestRecord, SampleRequest
from troupellm.load_tests.client.sse import SseReader

STREAM = b'data: {"a": 1}\n\n: keep-alive\n\ndata: one\ndata: two\r\n\r\nevent: x\ndata:[DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_do_not_depend_on_how_bytes_are_cut(size: int) -> None:
    reader = SseReader()
    events = [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])]
    assert events == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n1\r\n!\r\n0\r\nTrailer: t\r\n\r\n"
SIZED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nbody"


@pytest.mark.parametrize(("reply", "status", "body"), [(CHUNKED, 200, b"hello!"), (SIZED, 404, b"body")])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_replies_do_not_depend_on_how_bytes_are_cut(reply: bytes, status: int, body: bytes, size: int) -> None:
    parser = ResponseParser()
    got = b"".join(parser.feed(reply[at : at + size]) for at in range(0, len(reply), size))
    assert (parser.status, got, parser.complete) == (status, body, True)
    parser.eof()


def test_a_reply_that_ends_early_is_noticed() -> None:
    parser = ResponseParser()
    parser.feed(CHUNKED[:-10])
    with pytest.raises(ProtocolError, match="middle"):
        parser.eof()


def test_a_reply_of_unknown_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\nabc") == b"abc"
    assert not parser.complete
    parser.eof()
    assert parser.complete


@pytest.mark.parametrize("reply", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"])
def test_nonsense_is_a_protocol_error(reply: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(reply)


def read(*chunks: object, wanted: int = 3, ignore_eos: bool = True, done: bool = True) -> RequestRecord:
    """A record that saw these chunks one second apart, sent at second 0."""
    record = RequestRecord(index=0, wanted_tokens=wanted, ignore_eos=ignore_eos, sent=0.0, status=200)
    for second, chunk in enumerate(chunks, start=1):
        record.on_event(json.dumps(chunk).encode(), float(second))
    if done:
        record.on_event(b"[DONE]", 99.0)
    record.judge()
    return record


def text(piece: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"text": piece, "finish_reason": finish}], **more}


def usage(tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}


def test_times_of_a_stream() -> None:
    record = read(text("a"), text("b"), text("c", "length"), usage(3))
    assert record.ok
    assert (record.ttft, record.latency, record.itls, record.tpot) == (1.0, 3.0, [1.0, 1.0], 1.0)
    assert (record.prompt_tokens, record.output_tokens, record.text) == (5, 3, "abc")


def test_a_role_chunk_is_not_the_first_token() -> None:
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    piece = {"choices": [{"delta": {"content": "x"}, "finish_reason": None}]}
    last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    record = read(role, piece, last, usage(2), ignore_eos=False)
    assert record.ok
    assert (record.ttft, record.latency, record.itls) == (2.0, 3.0, [])


def test_tokens_per_chunk_come_from_running_usage_or_token_ids() -> None:
    running = read(
        text("ab", usage={"prompt_tokens": 5, "completion_tokens": 2}),
        text("c", "length", usage={"prompt_tokens": 5, "completion_tokens": 3}),
    )
    assert (running.ok, running.chunk_tokens) == (True, [2, 1])
    ids = read({"choices": [{"text": "ab", "token_ids": [1, 2], "finish_reason": "length"}]}, usage(2), wanted=2)
    assert (ids.ok, ids.chunk_tokens, ids.token_ids) == (True, [2], [1, 2])


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (read(text("a"), text("b", "length"), usage(2)), "short stream: 2 of 3 tokens"),
        (read(text("a"), text("b"), text("c"), usage(3)), "short stream: no finish reason"),
        (read(text("a"), text("c", "length"), usage(3), done=False), "short stream: ended without [DONE]"),
        (read(text("a"), text("c", "length")), "the stream carried no usage, so tokens cannot be counted"),
        (read(text("a"), {"error": {"message": "worker\ndied"}}), "error event: worker died"),
        (read(), "short stream: no finish reason"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failure(record: RequestRecord, error: str) -> None:
    assert record.error == error


def test_an_answer_that_may_stop_early_is_not_short() -> None:
    assert read(text("a", "stop"), usage(1), ignore_eos=False).ok


def test_trusted_certificates_are_read_once_for_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    read, really = [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: read.append(1) or really())
    client._trusting.cache_clear()
    target = client.Target.make(
        urlsplit("https://127.0.0.1:1"), "/v1/completions", api_key=None, chat=False, model="m", body={}, timeout=30.0
    )
    records = [RequestRecord(index=index, wanted_tokens=1) for index in range(3)]

    async def ask_all() -> None:
        for record in records:
            await client.exchange(target, SampleRequest(prompt="x", output_len=1), record)

    asyncio.run(ask_all())
    assert all("cannot connect" in record.error for record in records)
    assert len(read) == 1
