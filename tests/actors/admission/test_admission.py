"""The door: caps, order in line, and sensible advice to those who are refused."""

from typing import Any

import anyio
import pytest

from troupellm.actors.admission.admission import Admission, AdmissionSlot, _Applicant
from troupellm.actors.admission.prompts import estimate_tokens, request_group_of
from troupellm.protocol.config.engine import SchedulerConfig, TenantConfig
from troupellm.protocol.errors import EngineOverloaded, EngineStopped, RateLimited
from troupellm.protocol.messages.input import ChatPrompt, Demand, ManyPrompts, RequestGroup, TextPrompt, TokensPrompt
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.tests.support.environment.hand_clock import HandClock

pytestmark = pytest.mark.anyio


def door(
    seqs: int = 2, queued: int = 2, tokens: int | None = None, tenants: tuple[TenantConfig, ...] = ()
) -> tuple[Admission, HandClock]:
    clock = HandClock()
    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_queued_reqs=queued, max_num_queued_tokens=tokens, tenants=tenants
    )
    return Admission(config, clock), clock


def want(sequences: int, tokens: int, tenant: str = "", **fields: Any) -> Demand:
    return Demand(sequences=sequences, tokens=tokens, tenant=tenant, **fields)


def test_a_request_with_n_answers_counts_n_times() -> None:
    admission, _ = door()
    place = admission.enter(want(3, 1))
    admission.enter(want(1, 1))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 1))
    place.leave()
    place.leave()
    admission.enter(want(3, 1))


def test_a_request_larger_than_the_room_gets_in_alone() -> None:
    admission, _ = door()
    admission.enter(want(64, 1)).leave()
    admission.enter(want(1, 1))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(64, 1))


def test_waiting_tokens_are_capped_until_scheduled() -> None:
    admission, _ = door(seqs=8, tokens=100)
    place = admission.enter(want(1, 60))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 60))
    place.tokenized(40)
    other = admission.enter(want(1, 60))
    place.scheduled()
    other.scheduled()
    admission.enter(want(1, 5000))


def test_retry_after_follows_the_pace_of_leaving() -> None:
    admission, clock = door(seqs=4, queued=0)
    places = [admission.enter(want(1, 1)) for _ in range(4)]
    with pytest.raises(EngineOverloaded) as caught:
        admission.enter(want(1, 1))
    assert caught.value.retry_after == 1.0
    for place in places[:3]:
        clock.time += 4.0
        place.leave()
        admission.enter(want(1, 1))
    with pytest.raises(EngineOverloaded) as caught:
        admission.enter(want(2, 1))
    assert caught.value.retry_after == pytest.approx(8.0)


async def test_waiting_requests_are_admitted_in_order() -> None:
    admission, _ = door(seqs=1, queued=0)
    first = admission.enter(want(1, 1))
    served: list[tuple[str, AdmissionSlot]] = []

    async def wait(name: str) -> None:
        served.append((name, await admission.wait(want(1, 1))))

    async with anyio.create_task_group() as group:
        for name in ("a", "b", "c"):
            group.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(EngineOverloaded):
            admission.enter(want(1, 1))
        first.leave()
        for expected in ("a", "b", "c"):
            await anyio.wait_all_tasks_blocked()
            name, place = served.pop()
            assert name == expected
            place.leave()


async def test_leaving_the_line_frees_it_for_the_next() -> None:
    admission, _ = door(seqs=2, queued=0)
    first = admission.enter(want(1, 1))
    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()

        async def large() -> None:
            with scope:
                await admission.wait(want(2, 1))

        group.start_soon(large)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(admission.wait, want(1, 1))
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 2
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 0
    first.leave()


async def test_a_crowd_leaves_the_line_without_a_look_at_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may be cancelled at once, and the event loop would stand still while each searches the line."""
    compared: list[_Applicant] = []

    def equals(self: _Applicant, other: object) -> bool:
        compared.append(self)
        return self is other

    monkeypatch.setattr(_Applicant, "__eq__", equals)
    admission, _ = door(seqs=1, queued=0)
    admission.enter(want(1, 1))
    async with anyio.create_task_group() as group:
        for _ in range(30):
            group.start_soon(admission.wait, want(1, 1))
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 30
        group.cancel_scope.cancel()
    assert admission.waiting == 0
    assert not compared


async def test_closing_turns_everybody_away() -> None:
    admission, _ = door(seqs=1, queued=0)
    admission.enter(want(1, 1))
    refused: list[str] = []

    async def wait() -> None:
        try:
            await admission.wait(want(1, 1))
        except EngineStopped:
            refused.append("waited")

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        admission.close()
    assert refused == ["waited"]
    with pytest.raises(EngineStopped):
        admission.enter(want(1, 1))


def test_prompts_are_measured_without_a_tokenizer() -> None:
    assert estimate_tokens(TokensPrompt((1, 2, 3))) == 3
    assert estimate_tokens(TextPrompt("x" * 400)) == 101
    parts = [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}, {"role": "user", "content": "x" * 40}]
    assert estimate_tokens(ChatPrompt(messages=parts)) == 119
    assert estimate_tokens(ChatPrompt(messages=["junk"])) == 6  # type: ignore[list-item]


LOUD_AND_QUIET = (TenantConfig(name="loud"), TenantConfig(name="quiet"))


def test_a_flood_leaves_room_for_the_other_tenant() -> None:
    admission, _ = door(seqs=4, queued=4, tenants=LOUD_AND_QUIET)
    places = [admission.enter(want(1, 1, "loud")) for _ in range(6)]
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 1, "loud"))
    others = [admission.enter(want(1, 1, "quiet")) for _ in range(2)]
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 1, "quiet"))
    for place in (*places, *others):
        place.leave()
    for _ in range(6):
        admission.enter(want(1, 1, "loud"))


def test_waiting_tokens_are_kept_for_tenants_too() -> None:
    admission, _ = door(seqs=9, queued=9, tokens=100, tenants=LOUD_AND_QUIET)
    admission.enter(want(1, 70, "loud"))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 10, "loud"))
    admission.enter(want(1, 25, "quiet"))


def test_a_tenant_alone_has_the_whole_room() -> None:
    admission, _ = door(tenants=LOUD_AND_QUIET[:1])
    for _ in range(4):
        admission.enter(want(1, 1, "loud"))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 1, "loud"))


async def test_the_line_serves_the_tenant_with_the_fewest_inside() -> None:
    admission, _ = door(seqs=2, queued=0)
    inside = [admission.enter(want(1, 1, "loud")) for _ in range(2)]
    served: list[str] = []

    async def wait(name: str) -> None:
        await admission.wait(want(1, 1, name))
        served.append(name)

    async with anyio.create_task_group() as group:
        for name in ("loud", "loud", "quiet"):
            group.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
        inside.pop().leave()
        await anyio.wait_all_tasks_blocked()
        assert served == ["quiet"]
        group.cancel_scope.cancel()


AT_MOST_ONE = (TenantConfig(name="a", max_concurrency=1),)


async def test_a_tenant_in_line_is_let_in_no_further_than_its_own_limit() -> None:
    """Both ask while none of theirs is inside, and then there is room for both."""
    admission, _ = door(seqs=2, queued=0, tenants=AT_MOST_ONE)
    others = [admission.enter(want(1, 1)) for _ in range(2)]
    served: list[AdmissionSlot] = []

    async def wait() -> None:
        served.append(await admission.wait(want(1, 1, "a")))

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 2
        for other in others:
            other.leave()
        await anyio.wait_all_tasks_blocked()
        assert (len(served), admission.waiting, admission.quotas.snapshot()[0].inside) == (1, 1, 1)
        served.pop().leave()
        await anyio.wait_all_tasks_blocked()
        assert (len(served), admission.waiting, admission.quotas.snapshot()[0].inside) == (1, 0, 1)


async def test_a_request_that_waits_for_its_keys_limit_does_not_hold_back_others() -> None:
    admission, _ = door(seqs=4, queued=0, tenants=AT_MOST_ONE)
    others = [admission.enter(want(1, 1, "b")) for _ in range(4)]
    served: list[str] = []

    async def wait(name: str) -> None:
        await admission.wait(want(1, 1, name))
        served.append(name)

    async with anyio.create_task_group() as group:
        for name in ("a", "a", "b"):
            group.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
        for expected in (["a"], ["a", "b"]):
            others.pop().leave()
            await anyio.wait_all_tasks_blocked()
            assert served == expected
        others.pop().leave()
        assert admission.waiting == 1
        admission.enter(want(1, 1, "b"))  # who has more inside than the one in line
        group.cancel_scope.cancel()
    assert admission.waiting == 0


async def test_the_limit_per_minute_is_checked_again_when_a_waiting_request_is_admitted() -> None:
    admission, _ = door(seqs=2, queued=0, tenants=(TenantConfig(name="a", requests_per_minute=1),))
    others = [admission.enter(want(1, 1)) for _ in range(2)]
    outcomes: list[str] = []

    async def wait() -> None:
        try:
            await admission.wait(want(1, 1, "a"))
        except RateLimited as error:
            outcomes.append(error.code)
        else:
            outcomes.append("in")

    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        assert admission.waiting == 2
        for other in others:
            other.leave()
    assert sorted(outcomes) == ["in", "rate_limit_exceeded"]
    (account,) = admission.quotas.snapshot()
    assert (account.requests, account.limited, account.inside, admission.waiting) == (1, 1, 1, 0)


async def test_the_further_prompts_of_a_long_call_wait_for_their_tenants_limit() -> None:
    admission, _ = door(seqs=4, queued=0, tenants=AT_MOST_ONE)
    first = admission.enter(want(1, 1, "a", many_prompts=ManyPrompts(first=True, tokens=2)))
    async with anyio.create_task_group() as group:
        group.start_soon(admission.wait, want(1, 1, "a", many_prompts=ManyPrompts(first=False, tokens=2)))
        await anyio.wait_all_tasks_blocked()
        assert (admission.waiting, admission.quotas.snapshot()[0].inside) == (1, 1)
        first.leave()
    assert (admission.waiting, admission.quotas.snapshot()[0].inside) == (0, 1)


def test_a_party_counts_whole_to_the_limit_of_its_tenant() -> None:
    admission, _ = door(seqs=9, tenants=(TenantConfig(name="a", max_concurrency=3),))
    request_group = RequestGroup(name="call", sequences=3, tokens=3)
    members = [admission.enter(want(1, 1, "a", request_group=request_group))]
    with pytest.raises(RateLimited, match="3 sequences at once"):
        admission.enter(want(1, 1, "a"))
    members += [admission.enter(want(1, 1, "a", request_group=request_group)) for _ in range(2)]
    assert admission.quotas.snapshot()[0].inside == 3
    for member in members:
        member.leave()
    admission.enter(want(1, 1, "a", request_group=request_group)).leave()  # the others do not come
    assert admission.quotas.snapshot()[0].inside == 0


def test_a_party_is_let_in_as_a_whole_or_not_at_all() -> None:
    admission, _ = door(seqs=4, queued=0)
    other = admission.enter(want(2, 1))
    request_group = RequestGroup(name="call", sequences=3, tokens=3)
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 1, request_group=request_group))
    other.leave()
    members = [admission.enter(want(1, 1, request_group=request_group))]
    with pytest.raises(EngineOverloaded):
        admission.enter(want(2, 1))  # the rest of the group has its room already
    members += [admission.enter(want(1, 1, request_group=request_group)) for _ in range(2)]
    admission.enter(want(1, 1))
    for member in members:
        member.leave()
    admission.enter(want(3, 1))


def test_a_group_whose_request_leaves_gives_back_the_room_of_the_whole_group() -> None:
    admission, _ = door(seqs=4, queued=0, tokens=10)
    request_group = RequestGroup(name="call", sequences=4, tokens=10)
    first = admission.enter(want(1, 2, request_group=request_group))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 1))
    first.leave()
    admission.enter(want(4, 10))
    with pytest.raises(EngineOverloaded):
        admission.enter(want(1, 0))


def test_prompts_of_one_call_make_a_party() -> None:
    params = SamplingParams(n=2, max_tokens=5)
    assert request_group_of("call", [TokensPrompt((1, 2))], params) is None
    request_group = request_group_of("call", [TokensPrompt((1, 2)), TokensPrompt((1, 2, 3))], params)
    assert request_group == RequestGroup(name="call", sequences=4, tokens=5, max_tokens=20)


def test_a_party_is_one_request_of_its_tenant() -> None:
    admission, _ = door(seqs=9, tenants=(TenantConfig(name="a", requests_per_minute=2),))
    request_group = RequestGroup(name="call", sequences=3, tokens=3)
    for _ in range(3):
        admission.enter(want(1, 1, "a", request_group=request_group))
    admission.enter(want(1, 1, "a"))
    with pytest.raises(RateLimited):
        admission.enter(want(1, 1, "a"))
