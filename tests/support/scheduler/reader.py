"""A reader that keeps score of what the scheduler has shown."""

from dataclasses import dataclass, field

from troupellm.protocol.messages.output import RequestClosed, RowFinished, StepOutput


@dataclass
class Reader:
    """Collects what is shown and checks that nothing follows an end."""

    streams: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, RowFinished] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    closed: dict[int, RequestClosed] = field(default_factory=dict)

    def read(self, output: StepOutput | None) -> None:
        if output is None:
            return
        position = 0
        for row, count in zip(output.rows, output.token_counts, strict=True):
            assert row not in self.finished, "tokens after the end"
            assert row // 100 not in self.closed, "tokens after the close"
            assert count > 0
            self.streams.setdefault(row, []).extend(output.tokens[position : position + count])
            position += count
        assert position == len(output.tokens)
        for finished in output.finished:
            assert finished.row not in self.finished, "a row finished twice"
            self.finished[finished.row] = finished
        for failed in output.failed:
            assert failed.row not in self.failed
            self.failed[failed.row] = failed.message
        for closed in output.closed:
            assert closed.request not in self.closed, "a request closed twice"
            self.closed[closed.request] = closed
