"""An outbox that remembers everything, and the messages that the output actor gets."""

import tempfile
from array import array
from pathlib import Path

from troupellm.actors.output.detokenizer import TextTables
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.messages.output import OpenRequest, RequestClosed, StepOutput
from troupellm.protocol.messages.worker import RowLogprobs
from troupellm.protocol.params.outputs import Usage
from troupellm.tests.support.checkpoints import text_models

with tempfile.TemporaryDirectory() as _folder:
    TOKENIZER = Tokenizer.load(text_models.byte_level(Path(_folder)))
TABLES = TextTables(TOKENIZER)
END = 0
USAGE = Usage(prompt_tokens=2, completion_tokens=3)


class Slot:
    """An outbox that remembers everything."""

    def __init__(self, *, streams: bool = True) -> None:
        self.streams = streams
        self.prompt: tuple[int, ...] | None = None
        self.deltas: list = []
        self.wakes = 0
        self.closed: tuple | None = None
        self.error: Exception | None = None
        self.prompt_entries: list | None = None
        self.on_wake = lambda: None

    def opened(self, prompt_token_ids):
        self.prompt = prompt_token_ids

    def push(self, delta):
        self.deltas.append(delta)

    def prompt_logprobs(self, entries):
        self.prompt_entries = list(entries)

    def close(self, usage, scheduled, first_token):
        assert self.closed is None
        assert self.error is None
        self.closed = (usage, scheduled, first_token)

    def fail(self, error, spent=None):
        assert self.closed is None
        assert self.error is None
        self.error = error

    def wake(self):
        self.wakes += 1
        self.on_wake()

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def tokens(self, index: int = 0) -> tuple[int, ...]:
        return tuple(i for delta in self.deltas if delta.index == index for i in delta.token_ids)

    def ends(self, index: int = 0) -> list:
        return [(d.finish_reason, d.stop_reason) for d in self.deltas if d.index == index and d.finish_reason]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def opened(slot: Slot, request: int = 1, rows=(10,), **changes) -> OpenRequest:
    settings = {
        "stop_strings": (),
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "detokenize": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "prompt_token_ids": array("i", [5, 6]).tobytes(),
    }
    return OpenRequest(request=request, outbox=slot, rows=rows, **{**settings, **changes})


def step(tokens: dict[int, list[int]], **more) -> StepOutput:
    return StepOutput(
        step=0,
        rows=tuple(tokens),
        token_counts=tuple(map(len, tokens.values())),
        tokens=tuple(i for row in tokens.values() for i in row),
        **more,
    )


def closed(request: int = 1, error=None) -> RequestClosed:
    return RequestClosed(request=request, usage=USAGE, scheduled=1.0, first_token=2.0, error=error)


def row_logprobs(row: int, position: int, columns: list[list[int]]) -> RowLogprobs:
    flat = [i for one in columns for i in one]
    return RowLogprobs(
        row=row,
        position=position,
        width=len(columns[0]),
        token_ids=array("i", flat).tobytes(),
        logprobs=array("f", [-0.5 * n for n in range(len(flat))]).tobytes(),
        ranks=array("i", [7] * len(columns)).tobytes(),
    )
