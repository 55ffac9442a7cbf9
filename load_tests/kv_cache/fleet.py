"""Sessions of agents on our scheduler, with a worker whose steps take virtual time. No model, no event loop, no clock.

A turn's prompt is all of the session so far. Sessions take turns in a circle, so the next turn of each one comes after
those of all others, which is where an LRU cache that is too small finds nothing.
"""

from collections import deque
from statistics import mean
from typing import Any

import msgspec

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.config.kv_hints import KeepTurn, LeaseConfig, PrefixLease
from troupellm.protocol.messages.output import StepOutput
from troupellm.protocol.messages.scheduler import SequenceSpec, SubmitRequest, WorkerLost
from troupellm.protocol.messages.worker import CacheGroup, SamplingState, StepPlan, StepResult, WorkerReady

VOCAB = 32_000
BLOCK_SIZE = 16
WATCHED = 0
"""The session that sends hints."""
_STEP_SECONDS, _TOKEN_SECONDS = 2e-3, 2e-5
_MOST_TURNS = 1_000
_LEASE_SECONDS = 300.0


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a session, and how many sessions there are."""

    sessions: int = 50
    turns: int = 30
    fits: int = 20
    """Sessions that the KV cache holds."""
    beginning: int = 1024
    asked: int = 32
    """Per turn."""
    answered: int = 16
    at_once: int = 8
    """Turns that are in the engine together."""

    @property
    def longest(self) -> int:
        return self.beginning + self.turns * (self.asked + self.answered)

    @property
    def num_blocks(self) -> int:
        return self.fits * -(-self.longest // BLOCK_SIZE)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    cached: float
    """Of the watched session, the share of each turn's past that was found."""
    others_per_second: float
    """Tokens generated for the other sessions."""
    first_token: float
    """Mean seconds of the other sessions from arrival."""
    answers: dict[int, tuple[int, ...]]
    """By row."""


class Fleet:
    def __init__(self, shape: Shape, *, fraction: float, hints: frozenset[int], lose_at: int = -1) -> None:
        """
        Args:
            fraction: of the KV blocks that leases may cover.
            hints: sessions that send hints, each turn; they are one key's, the others another one's.
            lose_at: the step after which the worker is lost once.
        """
        zeros: dict[str, Any] = dict.fromkeys(
            ("num_parameters", "weight_bytes", "kv_cache_bytes", "activation_bytes", "memory_free_bytes"), 0
        )
        self._ready = WorkerReady(
            vocab_width=VOCAB,
            max_model_len=shape.longest + 1,
            num_blocks=shape.num_blocks,
            block_size=BLOCK_SIZE,
            groups=(CacheGroup(num_layers=1),),
            dtype="float32",
            device="none",
            architecture="none",
            load_seconds=0.0,
            **zeros,
        )
        config = SchedulerConfig(max_num_seqs=shape.at_once, max_num_batched_tokens=2048, max_plans_in_flight=1)
        self.core = SchedulerCore(
            config,
            self._ready,
            enable_prefix_caching=True,
            hash_key=b"a secret of the benchmark",
            leases=LeaseConfig(kv_lease_fraction=fraction),
        )
        self._shape, self._hints, self._lose_at = shape, hints, lose_at
        self._now = 0.0
        self._steps = 0
        self._lengths: dict[int, int] = {}
        self._texts = {session: _asked(session, 0, shape.beginning) for session in range(shape.sessions)}
        self._turns = dict.fromkeys(range(shape.sessions), 0)
        self._arrivals: dict[int, float] = {}
        self._past: dict[int, int] = {}
        self._answers: dict[int, list[int]] = {}
        self._shares: list[float] = []
        self._firsts: list[float] = []

    def run(self) -> Outcome:
        """All turns of all sessions.

        Raises:
            RuntimeError: a request failed.
        """
        shape = self._shape
        waiting = deque(range(shape.sessions))
        inside = 0
        while waiting or inside:
            while waiting and inside < shape.at_once:
                self._submit(waiting.popleft())
                inside += 1
            for session in self._step():
                inside -= 1
                if self._turns[session] < shape.turns:
                    waiting.append(session)
        others = sum(len(answer) for row, answer in self._answers.items() if row // _MOST_TURNS not in self._hints)
        return Outcome(
            cached=mean(self._shares),
            others_per_second=others / self._now,
            first_token=mean(self._firsts),
            answers={row: tuple(answer) for row, answer in self._answers.items()},
        )

    def _submit(self, session: int) -> None:
        shape, turn = self._shape, self._turns[session]
        number = session * _MOST_TURNS + turn
        self._past[number] = len(self._texts[session]) if turn else 0
        self._texts[session] += _asked(session, turn + 1, shape.asked)
        prompt = self._texts[session]
        hinted = session in self._hints
        self._arrivals[number] = self._now
        self._answers[number] = []
        self.core.submit(
            SubmitRequest(
                request=number,
                request_id=str(number),
                arrival=self._now,
                max_tokens=shape.answered,
                min_tokens=0,
                prompt=b"".join([token.to_bytes(4, "little") for token in prompt]),
                sequences=(SequenceSpec(row=number, sampling=SamplingState(temperature=0.0)),),
                stop_token_ids=frozenset(),
                eos_token_ids=frozenset(),
                tenant=_tenant(hinted),
                session=str(session) if hinted else "",
                leases=(PrefixLease(len(prompt), _LEASE_SECONDS),) if hinted else (),
            )
        )

    def _step(self) -> list[int]:
        """One step; the sessions whose turns it ended."""
        plan = self.core.plan(self._now)
        if plan is None:
            raise RuntimeError("there are requests, and nothing is planned")
        result = self._answer(plan)
        self._now += _STEP_SECONDS + _TOKEN_SECONDS * sum(plan.counts)
        if self._steps == self._lose_at:
            self.core.lose_worker(WorkerLost("killed", fault=False))
            self.core.worker_restarted(self._ready)
            self._steps += 1
            return []
        self._steps += 1
        ended = self._read(self.core.update(result, self._now))
        self.core.take_stats()
        return ended

    def _answer(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self._lengths[new.row] = len(new.token_ids) // 4
        counts, tokens = [], []
        for row, start, planned in zip(plan.rows, plan.starts, plan.counts, strict=True):
            done = start + planned >= self._lengths[row]
            counts.append(int(done))
            if done:
                tokens.append((31 * row + self._lengths[row]) % VOCAB)
                self._lengths[row] += 1
        return StepResult(
            step=plan.step,
            engine_epoch=plan.engine_epoch,
            rows=plan.rows,
            epochs=plan.epochs,
            token_counts=tuple(counts),
            tokens=tuple(tokens),
        )

    def _read(self, output: StepOutput) -> list[int]:
        tokens = iter(output.tokens)
        for row, count in zip(output.rows, output.token_counts, strict=True):
            self._answers[row] += [next(tokens) for _ in range(count)]
        ended = []
        for closed in output.closed:
            if closed.error is not None or closed.first_token is None:
                raise RuntimeError(f"a turn failed: {closed.error}")
            session = closed.request // _MOST_TURNS
            self._texts[session] += self._answers[closed.request]
            self._turns[session] += 1
            past = self._past[closed.request]
            if session == WATCHED and past:
                self._shares.append(min(closed.usage.cached_tokens, past) / past)
            if session in self._hints:
                self.core.leases.handle(KeepTurn(_tenant(hinted=True), str(session)))
            else:
                self._firsts.append(closed.first_token - self._arrivals[closed.request])
            ended.append(session)
        return ended


def _tenant(hinted: bool) -> str:
    return "agents" if hinted else "others"


def _asked(session: int, turn: int, length: int) -> list[int]:
    """Tokens that no other session and no other turn begins with."""
    return [session, turn, *((7 * place + 13 * turn) % VOCAB for place in range(length - 2))]
