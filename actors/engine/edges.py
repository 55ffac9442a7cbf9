"""Which actors may talk to each other, what happens when an edge is full, and what follows a crash."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from troupellm.actors.runtime.restart_intensity import Intensity
from troupellm.actors.runtime.supervise import Strategy
from troupellm.protocol.config.engine import EngineConfig

CONTROLS_PER_SEQUENCE = 8
"""Control messages that may wait per sequence inside: its end, a pause, a resumption, and repeats of them."""
CONTROL_MARGIN = 4096

Overflow = Literal["wait", "credit", "drop"]


class Edge(msgspec.Struct, frozen=True):
    sender: str
    receiver: str
    message: str
    capacity: int
    overflow: Overflow
    """wait: the sender waits. credit: the sender never has more under way. drop: counted and forgotten."""


def edges(config: EngineConfig, *, sees: bool = False) -> tuple[Edge, ...]:
    """The data lanes. No more requests are open than admission lets in, so a step's result always finds room.

    Control lanes, which never wait: output to scheduler (StopStringMet), outbox to scheduler (AbortRequest,
    ReaderPaused, ReaderResumed), engine to scheduler (AbortRequest, ResetPrefixCache, HaltPlanning, ResumePlanning),
    adapters and scheduler to each other (AdapterLoaded; ServeAdapter, DropAdapter), outbox to adapters (AbortRequest),
    worker to scheduler (WorkerLost, WorkerBack, WorkerAsleep), scheduler and watchdog to worker (RestartWorker), engine
    to worker (CommandWorker, while nothing is planned), intake and guide to scheduler (AbortRequest), outbox and engine
    to guide and media (AbortRequest), scheduler to guide (BuildGuide), guide to scheduler (GuideBuilt).

    An API server process stands beside "engine": its requests come in by the same edge, after a place
    was taken for each; what goes to it merges in each request's outbox while much waits in its socket.

    Args:
        sees: the model sees images.
    """
    plans = config.scheduler.plans_in_flight
    requests = config.scheduler.max_num_seqs + config.scheduler.max_num_queued_reqs
    adapters = (
        Edge("engine", "adapters", "PrepareRequest, AddAdapter, RemoveAdapter, FindAdapter", 64, "wait"),
        Edge("adapters", "intake", "PrepareRequest", 64, "wait"),
    )
    media = (
        Edge("engine", "media", "PrepareRequest", 64, "wait"),
        Edge("media", "intake", "PrepareRequest", 64, "wait"),
        *((Edge("media", "adapters", "PrepareRequest", 64, "wait"),) if config.lora.enabled else ()),
    )
    return (
        *(media if sees else ()),
        *(adapters if config.lora.enabled else ()),
        Edge("engine", "intake", "PrepareRequest", 64, "wait"),
        Edge("intake", "output", "OpenRequest", 64, "wait"),
        Edge("intake", "scheduler", "SubmitRequest", requests, "wait"),
        Edge("intake", "guide", "GuideRequest", 64, "wait"),
        Edge("guide", "output", "OpenRequest", 64, "wait"),
        Edge("guide", "scheduler", "SubmitRequest", 64, "wait"),
        Edge("scheduler", "worker", "StepPlan", plans, "credit"),
        Edge("worker", "scheduler", "StepFinished", plans, "credit"),
        Edge("scheduler", "output", "StepOutput", 16, "wait"),
        Edge("scheduler", "metrics", "StepStats, RequestStats", 1024, "drop"),
        Edge("engine", "metrics", "RequestRejected", 64, "drop"),
    )


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The supervision of one actor."""

    strategy: Strategy
    intensity: Intensity = Intensity()
    """More crashes than that end the engine with the root cause, under any strategy."""
    hint: str
    """The advice in the log when the actor's crash has ended the engine."""


_BUG = "this is a bug of troupellm; the traceback and the state in the log show where"

SUPERVISION: Final[Mapping[str, Rule]] = {
    # In start order: consumers before their producers. They stop from the door inwards, the other way round.
    "metrics": Rule(strategy="restart", hint=_BUG),
    "output": Rule(strategy="restart", hint=_BUG),
    # Counts restarts of the model, which the actor does by itself. 16 per hour: bisecting 1,024 suspect requests
    # needs at most 11, and a finished step resets the count. The window is long, since a large model loads for a minute
    # and a hung step takes its whole deadline. Minutes without a finished step end the engine. A crash of the actor
    # itself ends the engine too: it alone knows the requests made of the model.
    "worker": Rule(
        strategy="stop",
        intensity=Intensity(restarts=16, seconds=3600.0, outage=240.0),
        hint="the model worker fails at every step: see the traceback; less memory per step is max_num_batched_tokens",
    ),
    # No other actor knows the tokens that the requests have so far.
    "scheduler": Rule(strategy="stop", hint=_BUG),
    "guide": Rule(strategy="restart", hint=_BUG),
    "intake": Rule(strategy="restart", hint=_BUG),
    "adapters": Rule(strategy="restart", hint=_BUG),
    "media": Rule(strategy="restart", hint=_BUG),
    "stalls": Rule(strategy="restart", hint=_BUG),
    "watchdog": Rule(strategy="restart", hint=_BUG),
}
