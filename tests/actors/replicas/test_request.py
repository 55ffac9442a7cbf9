"""A fleet's record of a request, and the message to another replica."""

from array import array

import pytest

from troupellm.actors.admission.admission import Admission
from troupellm.actors.output.outbox import LocalOutbox
from troupellm.actors.replicas.request import FleetRequest, with_seed
from troupellm.actors.runtime.ports import SystemClock
from troupellm.protocol.config.engine import SchedulerConfig
from troupellm.protocol.messages.input import Demand, Generated, Submission, TokensPrompt
from troupellm.protocol.params.outputs import TokenLogprob
from troupellm.protocol.params.pooling import PoolingParams
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.wire.api_process import Chunk

pytestmark = pytest.mark.anyio


def request_of(**sampling: object) -> FleetRequest:
    clock = SystemClock()
    slot = Admission(SchedulerConfig(), clock).enter(Demand(sequences=1, tokens=3))
    outbox = LocalOutbox(
        1, arrival=0.0, slot=slot, clock=clock, budget=9, to_scheduler=lambda _: None, on_terminal=lambda _: None
    )
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = FleetRequest(Submission(request_id="r", prompt=TokensPrompt([1, 2, 3]), params=params), slot, outbox)
    request.prepared(TokensPrompt([1, 2, 3], truncated=True))
    return request


def entry(token: int) -> TokenLogprob:
    return TokenLogprob(token_id=token, token="x", raw=b"x", logprob=-1.0, rank=1)


async def test_another_replica_is_told_the_tokens_of_each_sequence_and_which_have_ended() -> None:
    request = request_of(n=3)
    assert request.submit().generated == ()
    request.take(Chunk(7, 0, "ab", (5, 6)))
    request.take(Chunk(7, 2, "c", (9,), finish_reason="stop"))
    request.take(Chunk(7, 0, "d", (8,)))
    request.leave(died=True)
    told = request.submit()
    packed = [array("i", tokens).tobytes() for tokens in ((5, 6, 8), (), (9,))]
    assert told.generated == (Generated(packed[0]), Generated(packed[1]), Generated(packed[2], ended=True))
    assert told.prompt == array("i", [1, 2, 3]).tobytes()
    assert told.truncated
    assert (request.moves, request.complete, request.usage().completion_tokens) == (1, False, 4)


async def test_a_delta_in_parts_is_taken_as_a_whole_or_not_at_all() -> None:
    """Its text comes with the first part: a replica that dies between them must be asked for all of it again."""
    request = request_of(logprobs=1)
    parts = [
        Chunk(7, 0, "abc", (1,), (entry(1),), more=True),
        Chunk(7, 0, "", (2,), (entry(2),), more=True),
        Chunk(7, 0, "", (3,), (entry(3),), finish_reason="length"),
    ]
    assert [request.take(part) for part in parts[:2]] == [None, None]
    request.leave(died=True)
    assert request.submit().generated == ()
    deltas = [request.take(part) for part in parts]
    assert deltas[:2] == [None, None]
    whole = deltas[2]
    assert whole is not None
    assert (whole.text, whole.token_ids, whole.finish_reason) == ("abc", (1, 2, 3), "length")
    assert whole.logprobs == (entry(1), entry(2), entry(3))
    assert request.complete


async def test_log_probabilities_of_the_prompt_that_were_told_are_passed_over_once() -> None:
    request = request_of(prompt_logprobs=1)
    request.outbox.prompt_logprobs([None, entry(2)])
    request.leave(died=True)
    assert request.take_prompt((None,)) == 1
    assert request.take_prompt((entry(2), entry(3))) == 1
    assert request.take_prompt((entry(4),)) == 0


def test_a_request_without_a_seed_is_given_one() -> None:
    plain = Submission(request_id="r", prompt=TokensPrompt([1]), params=SamplingParams())
    assert with_seed(plain, 77).params.seed == 77
    seeded = Submission(request_id="r", prompt=TokensPrompt([1]), params=SamplingParams(seed=5))
    assert with_seed(seeded, 77) is seeded
    pooled = Submission(request_id="r", prompt=TokensPrompt([1]), params=SamplingParams(), pooling=PoolingParams())
    assert with_seed(pooled, 77) is pooled
