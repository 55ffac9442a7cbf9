"""Requests that a front takes back before the engine has them: ended for certain, and counted where they must be."""

from array import array
from typing import Any

import anyio
import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import Demand
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.wire.api_process import Abort, Admitted, Apply, Chunks, Ended, Submit
from troupellm.tests.support.engines.inside import system_of
from troupellm.tests.support.servers.front_pair import front_pair

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]


async def test_refusals_of_an_api_process_are_counted_like_those_of_the_engine(engine_of: Any, until: Any) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        rejected = system_of(engine).store.rejected
        for number, door in enumerate((pair.remote, engine), 1):
            for prompt in ([], [5, 2000], "\ud800"):
                with pytest.raises(InvalidRequest):
                    await door.generate(prompt, wait=False)
            await until(lambda number=number: rejected["invalid"] == 3 * number)
        with anyio.move_on_after(0):
            await pair.remote.generate(PROMPT)
        await pair.remote.generate(PROMPT, max_tokens=1)
        await until(lambda: not len(pair.session))
        assert rejected["invalid"] == 6  # requests that leave do not count as refused


async def test_an_abort_that_comes_together_with_the_prompt_ends_the_request(
    engine_of: Any, until: Any, quiet: Any
) -> None:
    async with engine_of() as engine, front_pair(engine) as pair:
        told = pair.to_front.frames

        def ends() -> list[Ended]:
            framed = [end for frame in told if isinstance(frame, Chunks) for end in frame.ended]
            return framed + [frame for frame in told if isinstance(frame, Ended)]

        demand = Demand(sequences=1, tokens=len(PROMPT))
        pair.session.handle(Apply(request=1, arrival=0.0, demand=demand, wait=True, deadline=None))
        await until(lambda: any(isinstance(frame, Admitted) for frame in told))
        pair.session.handle(
            Submit(
                request=1,
                request_id="r-1",
                prompt=array("i", PROMPT).tobytes(),
                params=SamplingParams(max_tokens=4000, ignore_eos=True),
                streaming=False,
                cache_salt=b"",
            )
        )
        pair.session.handle(Abort(1))
        await until(ends)
        assert [end.error is not None for end in ends()] == [True]
        assert not len(pair.session)
        await quiet(engine)
