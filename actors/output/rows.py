"""The output actor's state of requests, of their sequences, and of the rows that a step names."""

from collections.abc import Callable, Mapping, Sequence

from troupellm.actors.output.detokenizer import SequenceText
from troupellm.protocol.messages.output import OpenRequest, Outbox
from troupellm.protocol.params.outputs import TokenLogprob


class OutputRequest:
    """An open request. `due` is when its reader may be woken again, in seconds on the engine's clock."""

    __slots__ = (
        "begun", "dirty", "due", "interval", "members", "num_cut", "number", "outbox", "prompt_entries",
        "prompt_tokens", "rows", "truncated", "unseen",
    )  # fmt: skip

    def __init__(self, message: OpenRequest) -> None:
        self.number = message.request
        self.outbox: Outbox = message.outbox
        self.rows = message.rows
        self.members: list[OutputRow] = []
        """Its sequences, ended ones too."""
        self.prompt_tokens = len(message.prompt_token_ids) // 4
        self.truncated = message.truncated
        self.prompt_entries: list[TokenLogprob | None] | None = None if message.prompt_logprobs is None else [None]
        self.due = 0.0
        self.dirty = False
        self.begun = False
        """Its reader is woken for more than the end."""
        self.interval = message.stream_interval
        """Tokens of a sequence after which its reader is woken; None: after some time."""
        self.unseen: dict[int, int] = {}
        """Only with an interval: tokens since the last wake, by index of the sequence."""
        self.num_cut = -message.num_ended_tokens
        """Tokens generated after a stop string was found. The scheduler counts them, since it hears of a stop string
        later; they are subtracted from usage. Tokens of sequences that another engine has ended count below zero: the
        scheduler does not know of them."""


class OutputRow:
    """A sequence that has not ended."""

    __slots__ = ("feed", "ids", "index", "logprobs", "request", "show_stop_token", "started", "stepwise", "text")

    def __init__(self, index: int, request: OutputRequest, text: SequenceText | None) -> None:
        self.index = index
        self.request = request
        self.text = text
        """None when nothing is to be detokenized."""
        self.feed: Callable[[Sequence[int]], str] = _no_text if text is None else text.plain_feed
        """Decodes `ids` to text."""
        self.logprobs = False
        self.show_stop_token = False
        self.started = False
        self.ids: list[int] = []
        """Tokens that are text only when the reader is woken."""
        self.stepwise: SequenceText | None = None
        """`text` again, once single tokens are looked at for stop strings without further ado."""


class StepRows:
    """The rows that a step names, looked up once for as long as the steps name the same."""

    __slots__ = ("kept", "open_rows", "rows")

    def __init__(self, rows: tuple[int, ...], keeping: Mapping[int, OutputRow]) -> None:
        """keeping: the sequences whose tokens are only kept, by row."""
        self.rows = rows
        self.kept = [keeping.get(row) for row in rows]
        """By place in the step; None where more must be done than keeping the token."""
        self.open_rows = [row for row in self.kept if row is not None]


NO_ROWS = StepRows((), {})


def _no_text(token_ids: Sequence[int]) -> str:
    return ""
