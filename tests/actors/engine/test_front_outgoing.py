"""The frames sent to a front: all requests together, long outputs in portions, ends once."""

from troupellm.actors.engine.api_process_outgoing import FRAME_WEIGHT, PORTION, Outgoing, Sent
from troupellm.protocol.params.outputs import Delta, TokenLogprob, TopLogprob, Usage
from troupellm.protocol.wire.api_process import Chunks


class StubOutbox:
    """The part of an outbox that `Outgoing` reads."""

    def __init__(self, deltas: list[Delta], prompt: tuple[TokenLogprob | None, ...] | None = None) -> None:
        self.deltas = deltas
        self.prompt_token_ids = (1, 2)
        self.logprobs_of_prompt = prompt
        self.terminal, self.error, self.timing, self.vector = True, None, None, None
        self.usage = Usage(prompt_tokens=2, completion_tokens=1)

    @property
    def waiting(self) -> bool:
        return bool(self.deltas)

    def take(self) -> Delta | None:
        return self.deltas.pop(0) if self.deltas else None


def entry(token_id: int, top: int) -> TokenLogprob:
    alternatives = tuple(TopLogprob(token_id=rank, logprob=-1.0, rank=rank, token="t", raw=b"t") for rank in range(top))
    return TokenLogprob(token_id=token_id, logprob=-0.5, rank=1, token="t", raw=b"t", top=alternatives)


def test_many_logprobs_travel_in_portions_and_in_order() -> None:
    entries = tuple(entry(number, 20) for number in range(1000))
    whole = Delta(text="text", token_ids=tuple(range(1000)), logprobs=entries, finish_reason="length")
    request = Sent(4, StubOutbox([whole], prompt=(None, *entries)))  # type: ignore[arg-type]
    outgoing, frames = Outgoing(), []
    outgoing.mark(request)
    while (frame := outgoing.collect()) is not None:
        frames.append(frame)
    assert outgoing.empty
    assert len(frames) > 5  # 3 MB in all
    assert frames[0].opened == (4,)
    prompts = [prompt for frame in frames for prompt in frame.prompts]
    chunks = [chunk for frame in frames for chunk in frame.chunks]
    assert tuple(got for prompt in prompts for got in prompt.entries) == (None, *entries)
    assert all(len(prompt.entries) * 21 <= PORTION for prompt in prompts)
    assert tuple(got for chunk in chunks for got in chunk.logprobs) == entries
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(1000))
    assert "".join(chunk.text for chunk in chunks) == "text"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].finish_reason == "length"
    assert [end.request for frame in frames for end in frame.ended] == [4]
    assert frames[-1].ended


def test_pieces_of_a_paused_reader_stay_in_its_outbox() -> None:
    request = Sent(1, StubOutbox([Delta(text="a", token_ids=(1,))]))  # type: ignore[arg-type]
    outgoing = Outgoing()
    request.held = True
    outgoing.mark(request)
    frame = outgoing.collect()
    assert frame == Chunks(opened=(1,))
    assert outgoing.collect() is None
    request.held = False
    outgoing.mark(request)
    frame = outgoing.collect()
    assert frame is not None
    assert [chunk.text for chunk in frame.chunks] == ["a"]
    assert [end.request for end in frame.ended] == [1]


def test_an_end_is_told_once() -> None:
    request = Sent(1, StubOutbox([]))  # type: ignore[arg-type]
    outgoing = Outgoing()
    outgoing.mark(request)
    frame = outgoing.collect()
    assert frame is not None
    assert len(frame.ended) == 1
    outgoing.mark(request)  # the output actor wakes the reader once more
    assert outgoing.empty
    assert outgoing.collect() is None


def test_a_heavy_request_does_not_keep_the_others_from_the_next_frame() -> None:
    heavy = Sent(1, StubOutbox([Delta(index=number, text="x" * FRAME_WEIGHT) for number in range(3)]))  # type: ignore[arg-type]
    light = Sent(2, StubOutbox([Delta(text="y")]))  # type: ignore[arg-type]
    outgoing = Outgoing()
    outgoing.mark(heavy)
    outgoing.mark(light)
    order = []
    while (frame := outgoing.collect()) is not None:
        order += [chunk.request for chunk in frame.chunks]
    assert sorted(order) == [1, 1, 1, 2]
    assert order.index(2) < 3
