"""Places that are kept for tenants, and those who wait in line for the others: nobody is passed for ever."""

import anyio
import pytest

from troupellm.actors.admission import Admission
from troupellm.actors.ports import SystemClock
from troupellm.protocol.config import SchedulerConfig, TenantConfig
from troupellm.protocol.errors import EngineOverloaded
from troupellm.protocol.intake import Demand

pytestmark = pytest.mark.anyio

KEPT = (TenantConfig(name="loud"), TenantConfig(name="quiet"))
"""Two of eight places for each; four are common."""


class Line:
    def __init__(self) -> None:
        config = SchedulerConfig(max_num_seqs=4, max_num_queued_reqs=4, tenants=KEPT)
        self.admission = Admission(config, SystemClock())
        self.served: list[str] = []

    async def wait(self, tenant: str, sequences: int) -> None:
        await self.admission.wait(want(tenant, sequences))
        self.served.append(tenant)


def want(tenant: str, sequences: int = 1) -> Demand:
    return Demand(sequences=sequences, tokens=1, tenant=tenant)


async def test_who_waits_for_the_common_part_is_passed_only_by_those_for_whom_places_are_kept() -> None:
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


async def test_who_needs_more_than_the_common_part_is_passed_by_nobody_with_more_inside() -> None:
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
