"""Requests with guides for a scheduler whose worker is told to build them."""

from troupellm.actors.scheduler.core import SchedulerCore
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.guide import BuildGuide
from troupellm.protocol.messages.scheduler import GuideBuilt, SubmitRequest
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import BuildOutcome, GuideProgram
from troupellm.tests.support.scheduler.oracle import Harness, ready, submission

PROMPT = [1, 2, 3, 4, 5]


def harness_of(**config: object) -> Harness:
    config = {"max_plans_in_flight": 1} | config
    core = SchedulerCore(
        SchedulerConfig(**config), ready(), enable_prefix_caching=False, hash_key=b"k" * 32, builds_guides=True
    )
    return Harness(core)


def guided(request: int, text: str = "grammar", *, rows: int = 1, **fields: object) -> SubmitRequest:
    sampling = SamplingState(guide=GuideProgram(backend="llguidance", text=text))
    return submission(request, PROMPT, rows=rows, sampling=sampling, **fields)


def answer(harness: Harness, ask: BuildGuide, outcome: BuildOutcome = "built") -> None:
    harness.core.guide_built(GuideBuilt(ask.program, ask.engine_epoch, outcome))
    harness.core.assert_invariants()
