"""The link between a front and its parent: order, backpressure, ends, and peers that are not ours."""

import socket
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from troupellm.actors.runtime import link as links
from troupellm.actors.runtime.link import FrameError, Link, PeerGone, open_link
from troupellm.protocol.wire.api_process import (
    Abort,
    Admitted,
    ApiProcessReady,
    FromApiProcess,
    MetricsText,
    ToApiProcess,
)

pytestmark = pytest.mark.anyio


async def pair(version: str = "1") -> tuple[Link[Any, Any], Link[Any, Any]]:
    """The parent's end and the front's."""
    ours, theirs = socket.socketpair()
    return await open_link(ours, FromApiProcess, "1"), await open_link(theirs, ToApiProcess, version)


async def test_messages_come_in_order_both_ways() -> None:
    parent, front = await pair()
    for number in range(100):
        parent.post(Admitted(number))
        front.post(Abort(number))
    assert [(await front.receive()).request for _ in range(100)] == list(range(100))
    assert [(await parent.receive()).request for _ in range(100)] == list(range(100))
    await front.aclose()
    with pytest.raises(PeerGone):
        await parent.receive()
    parent.post(Admitted(1))  # taken and forgotten
    await parent.aclose()
    await parent.aclose()


async def test_messages_posted_before_the_end_arrive() -> None:
    parent, front = await pair()
    front.post(ApiProcessReady())
    await front.aclose()
    assert await parent.receive() == ApiProcessReady()
    await parent.aclose()


async def test_being_cancelled_over_the_opening_of_a_link_is_no_failed_opening() -> None:
    """The cancelled task has a link, and closes it."""
    ours, theirs = socket.socketpair()
    front: Link[Any, Any] = await open_link(theirs, ToApiProcess, "1")
    parent: Link[Any, Any] | None = None
    with anyio.CancelScope() as scope:
        scope.cancel()
        parent = await open_link(ours, FromApiProcess, "1")
        await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert parent is not None
    parent.post(Admitted(1))
    assert await front.receive() == Admitted(1)
    await parent.aclose()
    await front.aclose()


async def test_a_link_with_much_to_send_drains_only_when_its_peer_reads() -> None:
    parent, front = await pair()
    text = b"x" * 1_000_000
    for number in range(3):
        parent.post(MetricsText(number, text))
    with anyio.move_on_after(0.02) as waiting:
        await parent.drained()
    assert waiting.cancelled_caught
    assert [(await front.receive()).query for _ in range(3)] == [0, 1, 2]
    with anyio.fail_after(5):
        await parent.drained()
    await front.aclose()
    await parent.aclose()


async def test_a_peer_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_QUEUED_BYTES", 1_000_000)
    parent, front = await pair()
    with anyio.fail_after(5):
        for number in range(10):
            parent.post(MetricsText(number, b"x" * 500_000))
            await checkpoint()
    with pytest.raises(FrameError, match="stopped reading"):
        await parent.receive()
    await front.aclose()
    await parent.aclose()


async def test_a_lost_peer_leaves_nobody_drained_for_ever_but_who_is_cancelled() -> None:
    parent, front = await pair()
    parent.post(MetricsText(0, b"x" * 1_000_000))
    await front.aclose()
    with anyio.move_on_after(0.05) as waiting:
        while True:
            await parent.drained()
            parent.post(MetricsText(0, b"x"))
            await checkpoint()
    assert waiting.cancelled_caught
    with pytest.raises(PeerGone):
        await parent.receive()
    await parent.aclose()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins",
    ],
    ids=["http", "four gigabytes", "no message", "pickle"],
)
async def test_a_peer_that_is_not_ours_is_refused(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    parent: Link[Any, Any] = await open_link(ours, FromApiProcess, "1")
    with theirs:
        theirs.sendall(said)
        with pytest.raises(FrameError):
            await parent.receive()
    await parent.aclose()


async def test_another_release_is_refused() -> None:
    parent, front = await pair("2")
    for end in (parent, front):
        with pytest.raises(FrameError, match="version"):
            await end.receive()
        await end.aclose()
