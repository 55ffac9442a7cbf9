"""Worker processes that only exist in the test."""

import signal
from typing import Any

from troupellm.actors.worker.remote_worker import MODULE
from troupellm.protocol.messages.worker import LoadProgress, WorkerReady
from troupellm.protocol.wire.frames import Assembler, Codec
from troupellm.protocol.wire.worker import HELLO, Load, Loaded, Progress, ToWorker

READY = WorkerReady(
    vocab_width=100,
    max_model_len=64,
    num_blocks=7,
    block_size=16,
    groups=(),
    dtype="float32",
    device="cpu",
    architecture="Fake",
    num_parameters=1,
    weight_bytes=1,
    kv_cache_bytes=1,
    activation_bytes=1,
    memory_free_bytes=1,
    load_seconds=0.0,
)


class FakeChild:
    """Answers `Load` at once, unless it is mute."""

    def __init__(self, pid: int, events: Any) -> None:
        self.pid = pid
        self.events = events
        self.heard: list[ToWorker] = []
        self.stopped = False
        self.code: int | None = None
        self.immortal = self.mute = False
        self._codec: Codec[Any] = Codec()
        self._assembler: Assembler[ToWorker] = Assembler(ToWorker, HELLO)
        self.say(HELLO)

    def send(self, data: bytes) -> None:
        for message in self._assembler.feed(data):
            self.heard.append(message)
            if isinstance(message, Load) and not self.mute:
                self.say(Progress(LoadProgress(phase="weights")))
                self.say(Loaded(READY))

    def say(self, message: Any) -> None:
        self.events.received(self._codec.encode(message))

    def die(self, code: int) -> None:
        self.code = code
        self.events.closed()

    def kill(self) -> None:
        if self.code is None and not self.immortal:
            self.die(-signal.SIGKILL)

    async def ended(self, timeout: float) -> int | None:
        return self.code


class FakeProcesses:
    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.exhausted = False
        self.kernel_kills: int | None = 0
        """For want of memory, as far as the kernel says."""

    def oom_kills(self) -> int | None:
        return self.kernel_kills

    async def start(self, module: str, events: Any) -> FakeChild:
        assert module == MODULE
        if self.exhausted:
            raise OSError(11, "Resource temporarily unavailable")
        self.children.append(FakeChild(100 + len(self.children), events))
        return self.children[-1]
