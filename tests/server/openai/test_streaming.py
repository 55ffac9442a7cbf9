import pytest

from troupellm.protocol.params.outputs import Delta
from troupellm.server.openai.streaming import pump

pytestmark = pytest.mark.anyio


class Ready:
    """A stream whose wakes each bring several deltas."""

    def __init__(self, *wakes: list[Delta]) -> None:
        self._wakes = list(wakes)
        self._rest: list[Delta] = []

    def __aiter__(self):
        return self

    async def __anext__(self) -> Delta:
        if not self._rest:
            if not self._wakes:
                raise StopAsyncIteration
            self._rest = self._wakes.pop(0)
        return self._rest.pop(0)

    async def wake(self) -> list[Delta] | None:
        return self._wakes.pop(0) if self._wakes else None


class Events:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.tokens = 0

    def delivered(self, tokens: int) -> None:
        self.tokens += tokens

    def write_at_once(self, source: object, encode: object) -> None:
        """As behind a server that does not offer it."""

    async def send(self, data: bytes) -> None:
        self.sent.append(data)


async def test_pieces_of_many_choices_in_one_wake_are_one_send():
    texts = [[Delta(index=i, text=f"{wake}{i} ") for i in range(3)] for wake in "ab"]
    ends = [Delta(index=i, text=f"c{i} ", finish_reason="stop") for i in range(3)]
    events = Events()
    rest = await pump(Ready(*texts, ends), events, lambda delta: delta.text.encode(), 3)
    assert events.sent == [b"a0 a1 a2 ", b"b0 b1 b2 "]
    assert rest == b"c0 c1 c2 "


async def test_choices_may_end_in_different_wakes():
    wakes = [[Delta(index=0, text="x", finish_reason="stop"), Delta(index=1, text="y")], [Delta(index=1, text="z")]]
    wakes.append([Delta(index=1, finish_reason="length")])
    events = Events()
    rest = await pump(Ready(*wakes), events, lambda delta: delta.text.encode() or b"end", 2)
    assert (events.sent, rest) == ([b"xy", b"z"], b"end")
