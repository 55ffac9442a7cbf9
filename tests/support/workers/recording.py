"""A model worker that writes down what it was asked to compute."""

from collections.abc import Callable
from pathlib import Path

from troupellm.models.worker.worker import LaunchedStep, ModelWorker
from troupellm.protocol.messages.worker import StepPlan


class RecordingWorker(ModelWorker):
    """`spans`: (start, count) of every plan that named a request's rows, by request id."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self._names: dict[int, str] = {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for row in plan.new_rows:
            self._names[row.row] = row.request_id
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self.spans.setdefault(self._names[row], []).append((start, count))
        return super().launch(plan)

    def computed(self, request_id: str) -> tuple[int, int]:
        """In how many steps a request took part, and how many positions were computed for it."""
        spans = next(spans for name, spans in self.spans.items() if name.startswith(request_id))
        return len(spans), sum(count for _, count in spans)


def recording(workers: list[RecordingWorker]) -> Callable[[Path], RecordingWorker]:
    """A factory for `Engine(worker=...)` that also keeps what it makes."""

    def make(folder: Path) -> RecordingWorker:
        workers.append(RecordingWorker(folder))
        return workers[-1]

    return make
