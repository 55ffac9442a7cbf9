"""A worker in pure Python for the engine's tests: the right answer is a function of the row's tokens."""

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.sleep import SleepWorker, WakeWorker, WorkerCommand, WorkerReport
from troupellm.protocol.messages.worker import (
    CacheGroup,
    LoadProgress,
    NewRow,
    ProgressSink,
    RowError,
    StepPlan,
    StepResult,
    WorkerReady,
)

VOCABULARY = 1000
_MULTIPLIER = 31


def next_token(tokens: list[int]) -> int:
    """The fake model's next token after these tokens; it avoids the low ids, where special tokens live."""
    value = 7
    for token in tokens:
        value = (value * _MULTIPLIER + token + 1) % 1_000_003
    return 300 + value % (VOCABULARY - 400)


def answer(prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class _Ticket(msgspec.Struct, frozen=True):
    step: int
    result: StepResult


class FakeWorker:
    """Follows plans to the letter, and raises where a real worker would compute nonsense."""

    def __init__(self, *, num_blocks: int = 1024, max_model_len: int = 4096) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.rows: dict[int, list[int]] = {}
        self.epochs: dict[int, int] = {}
        self.steps = 0
        self.resets = 0
        self.closed = False
        self.poison: int | None = None
        """A prompt that holds this token kills the worker."""
        self.sick: int | None = None
        """A prompt that holds this token fails its own row."""
        self.gate: threading.Event | None = None
        """When set, every step waits for it."""
        self.on_load: Callable[[], None] = lambda: None
        self.ready: WorkerReady | None = None
        self.commands: list[WorkerCommand] = []
        self.missing: set[str] = set()
        """The memory that was given back for a sleep."""
        self.refusal: Exception | None = None
        """Of every command."""

    def load(self, config: EngineConfig, progress: ProgressSink) -> WorkerReady:
        progress(LoadProgress(phase="weights", done=1, total=1))
        self.on_load()
        self.ready = WorkerReady(
            vocab_width=VOCABULARY,
            max_model_len=self.max_model_len,
            num_blocks=self.num_blocks,
            block_size=config.cache.block_size,
            groups=(CacheGroup(num_layers=1),),
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
        return self.ready

    def launch(self, plan: StepPlan) -> _Ticket:
        assert not self.missing, "a plan came to a sleeping worker"
        if self.gate is not None:
            assert self.gate.wait(30)
        self.steps += 1
        for row in plan.freed_rows:
            self.rows.pop(row, None)
        for new in plan.new_rows:
            self._add(new)
        counts, tokens, errors = [], [], []
        for row, epoch, start, count in zip(plan.rows, plan.epochs, plan.starts, plan.counts, strict=True):
            assert self.epochs[row] == epoch
            held = self.rows[row]
            assert 0 <= start < start + count <= len(held), (start, count, len(held))
            sampled = start + count == len(held)
            if self.poison in held:
                raise ValueError("poisoned")
            if self.sick in held:
                errors.append(RowError(row, "this row is sick"))
                counts.append(0)
                held += [0] * sampled  # the next plan may name its position already
                continue
            counts.append(int(sampled))
            if sampled:
                held.append(next_token(held))
                tokens.append(held[-1])
        result = StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=tuple(counts),
            tokens=tuple(tokens),
            errors=tuple(errors),
        )
        return _Ticket(plan.step, result)

    def collect(self, ticket: _Ticket) -> StepResult:
        return ticket.result

    def command(self, command: WorkerCommand, progress: ProgressSink) -> WorkerReport:
        self.commands.append(command)
        if self.refusal is not None:
            raise self.refusal
        if isinstance(command, SleepWorker):
            self.missing |= {"kv_cache"} | ({"weights"} if command.level == 2 else set())
            self.rows.clear()
            self.epochs.clear()
            return WorkerReport(rss_before=9, rss_after=4)
        if isinstance(command, WakeWorker):
            self.missing -= ({"weights"} if command.weights else set()) | ({"kv_cache"} if command.kv_cache else set())
            return WorkerReport(ready=None if self.missing else self.ready)
        return WorkerReport()

    def reset(self) -> None:
        self.resets += 1
        self.rows.clear()
        self.epochs.clear()

    def close(self) -> None:
        self.closed = True

    def _add(self, new: NewRow) -> None:
        held = memoryview(new.token_ids).cast("i").tolist()
        self.rows[new.row] = held
        self.epochs[new.row] = new.epoch


@pytest.fixture
def fake_worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def make_worker() -> type[FakeWorker]:
    """For tests that need several, or other sizes."""
    return FakeWorker


@pytest.fixture
def expected() -> Callable[[list[int], int], list[int]]:
    """The tokens that follow a prompt."""
    return answer


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer and a chat template, and no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *letters]
    names += [f"w{index}" for index in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    settings: dict[str, Any] = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    (tmp_path / "config.json").write_bytes(b'{"architectures": ["Fake"], "eos_token_id": 2}')
    return tmp_path


@pytest.fixture
def engine_of(model_folder: Path, fake_worker: FakeWorker) -> Callable[..., Any]:
    """Makes engines over the fake worker, or over another one."""

    def make(worker: Any = None, **settings: Any) -> Any:
        from troupellm import Engine

        return Engine(model_folder, worker=lambda folder: worker or fake_worker, **settings)

    return make


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Lets the engine run until something is true."""
    import anyio
    from anyio.lowlevel import checkpoint

    async def wait(condition: Callable[[], object]) -> None:
        with anyio.fail_after(10):
            while not condition():
                await checkpoint()

    return wait


@pytest.fixture
def quiet(until: Callable[[Callable[[], object]], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    """Waits until nothing runs in an engine: every result has come back and every block is free."""

    async def wait(engine: Any) -> None:
        def nothing_runs() -> bool:
            snapshot = engine.snapshot()
            scheduler = snapshot.scheduler
            inside = scheduler.running + scheduler.waiting + scheduler.paused + scheduler.plans_in_flight
            return not (inside or snapshot.open_requests)

        await until(nothing_runs)
        assert engine.snapshot().scheduler.blocks_used == 0

    return wait
