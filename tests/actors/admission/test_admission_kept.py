"""Places that are kept for tenants, and requests that wait in line for the others: none is passed for ever."""

import anyio
import pytest

from troupellm.actors.admission.admission import Admission
from troupellm.actors.runtime.ports import SystemClock
from troupellm.protocol.config.engine import SchedulerConfig, TenantConfig
from troupellm.protocol.errors import EngineOverloaded
from troupellm.protocol.messages.input import Demand

pytestmark = pytest.mark.anyio

KEPT = (TenantConfig(name="loud"), TenantConfig(name="quiet"))
"""Two of eight places for each; four are common."""


class Line:
    def __init__(self, tokens: int | None = None) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_queued_reqs=4, max_num_queued_tokens=tokens, tenants=KEPT)
        self.admission = Admission(config, SystemClock())
        self.served: list[str] = []

    async def wait(self, tenant: str, sequences: int, tokens: int = 1) -> None:
        await self.admission.wait(want(tenant, sequences, tokens))
        self.served.append(tenant)


def want(tenant: str, sequences: int = 1, tokens: int = 1) -> Demand:
    return Demand(sequences=sequences, tokens=tokens, tenant=tenant)


async def test_a_request_that_waits_for_common_places_is_passed_only_by_tenants_with_kept_places() -> None:
    line = Line()
    others = [line.admission.enter(want("other")) for _ in range(2)]
    async with anyio.create_task_group() as group:
        for tenant, sequences in (("large", 4), ("other", 1), ("quiet", 1)):
            group.start_soon(line.wait, tenant, sequences)
            await anyio.wait_all_tasks_blocked()
        assert line.served == ["quiet"]
        line.admission.enter(want("quiet"))
        with pytest.raises(EngineOverloaded):
            line.admission.enter(want("quiet"))
        others.pop().leave()
        await anyio.wait_all_tasks_blocked()
        assert line.served == ["quiet"]
        others.pop().leave()
        await anyio.wait_all_tasks_blocked()
        assert line.served == ["quiet", "large"]
        group.cancel_scope.cancel()


async def test_a_request_larger_than_the_common_places_is_served_before_tenants_that_have_more_inside() -> None:
    line = Line()
    inside = [line.admission.enter(want("quiet")) for _ in range(2)]
    async with anyio.create_task_group() as group:
        for tenant, sequences in (("large", 5), ("quiet", 1)):
            group.start_soon(line.wait, tenant, sequences)
            await anyio.wait_all_tasks_blocked()
        inside.pop().leave()
        await anyio.wait_all_tasks_blocked()
        assert line.served == []
        inside.pop().leave()
    assert line.served == ["large", "quiet"]


async def test_a_request_that_waits_for_common_tokens_keeps_its_claim_to_common_places() -> None:
    """Else those who have tokens kept and those who have places kept could pass it in turn, for ever."""
    line = Line(tokens=80)
    long = line.admission.enter(want("other", tokens=40))
    for _ in range(2):
        line.admission.enter(want("loud")).scheduled()
    async with anyio.create_task_group() as group:
        group.start_soon(line.wait, "large", 1, 10)
        await anyio.wait_all_tasks_blocked()
        assert line.served == []
        with pytest.raises(EngineOverloaded):  # it has tokens kept, and no places any more
            line.admission.enter(want("loud"))
        line.admission.enter(want("quiet"))
        long.scheduled()
        await anyio.wait_all_tasks_blocked()
        assert line.served == ["large"]
        group.cancel_scope.cancel()
