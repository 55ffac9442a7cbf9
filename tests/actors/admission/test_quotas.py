"""Per-key limits, and numbers that are exact however a request ends."""

import msgspec
import pytest

from troupellm.actors.admission.admission import Admission
from troupellm.actors.engine.open_requests import OpenRequests
from troupellm.actors.output.core import OutputCore
from troupellm.protocol.config.engine import SchedulerConfig, TenantConfig
from troupellm.protocol.errors import InvalidRequest, RateLimited, RequestAborted
from troupellm.protocol.messages.input import Demand
from troupellm.protocol.messages.output import RequestClosed
from troupellm.protocol.messages.scheduler import AbortRequest
from troupellm.protocol.params.outputs import Usage
from troupellm.tests.support.environment.hand_clock import HandClock
from troupellm.tests.support.scheduler.output_bench import TABLES, Slot, closed, ids, opened, step


def door(**limits: int) -> tuple[Admission, HandClock]:
    clock = HandClock()
    tenants = (TenantConfig(name="a", **limits), TenantConfig(name="b", **limits))
    return Admission(SchedulerConfig(tenants=tenants), clock), clock


def want(tenant: str = "a", sequences: int = 1, tokens: int = 10, max_tokens: int = 0) -> Demand:
    return Demand(sequences=sequences, tokens=tokens, max_tokens=max_tokens, tenant=tenant)


def test_requests_per_minute_fill_up_evenly() -> None:
    admission, clock = door(requests_per_minute=6)
    for _ in range(6):
        admission.enter(want())
    with pytest.raises(RateLimited) as caught:
        admission.enter(want())
    assert (caught.value.code, caught.value.retry_after) == ("rate_limit_exceeded", pytest.approx(10))
    clock.time += 10
    admission.enter(want())
    with pytest.raises(RateLimited):
        admission.enter(want())


def test_a_limit_per_minute_saves_up_for_a_minute_and_no_longer() -> None:
    admission, clock = door(requests_per_minute=6, tokens_per_minute=100)
    clock.time += 600
    for _ in range(6):
        admission.enter(want(tokens=1))
    with pytest.raises(RateLimited, match="6 requests per minute"):
        admission.enter(want(tokens=1))
    clock.time += 600
    admission.enter(want(tokens=90))
    with pytest.raises(RateLimited, match="100 tokens per minute"):
        admission.enter(want(tokens=11))


def test_the_remaining_quota_is_told_with_admission_and_with_refusal() -> None:
    admission, _ = door(requests_per_minute=6, tokens_per_minute=60, max_concurrency=2)
    quota = admission.enter(want(tokens=12)).quota
    assert quota is not None
    assert (quota.limit_requests, quota.remaining_requests, quota.reset_requests) == (6, 5, pytest.approx(10))
    assert (quota.limit_tokens, quota.remaining_tokens, quota.reset_tokens) == (60, 48, pytest.approx(12))
    assert (quota.limit_concurrency, quota.remaining_concurrency) == (2, 1)
    with pytest.raises(RateLimited) as caught:
        admission.enter(want(tokens=49))
    assert caught.value.quota == quota


def test_concurrency_counts_sequences_and_comes_back_at_once() -> None:
    admission, _ = door(max_concurrency=3)
    place = admission.enter(want(sequences=2))
    with pytest.raises(RateLimited):
        admission.enter(want(sequences=2))
    place.leave()
    admission.enter(want(sequences=3)).leave()


def test_more_sequences_than_a_tenant_may_ever_have_are_refused_for_good() -> None:
    admission, _ = door(max_concurrency=3)
    with pytest.raises(InvalidRequest, match=r"4 sequences.* 3 at once") as caught:
        admission.enter(want(sequences=4))
    assert (caught.value.param, caught.value.code) == ("n", "integer_above_max_value")


def test_one_tenant_spends_nothing_of_another() -> None:
    admission, _ = door(requests_per_minute=3, tokens_per_minute=100, max_concurrency=3)
    for _ in range(3):
        admission.enter(want("a", tokens=30))
    with pytest.raises(RateLimited):
        admission.enter(want("a"))
    place = admission.enter(want("b"))
    assert place.quota is not None
    assert (place.quota.remaining_requests, place.quota.remaining_tokens) == (2, 90)
    admission.enter(want("nobody in particular"))


def test_tokens_are_put_right_when_the_request_has_ended() -> None:
    admission, clock = door(tokens_per_minute=1000)
    requests = OpenRequests(clock, lambda message: None)
    place = admission.enter(want(tokens=100, max_tokens=500))
    outbox = requests.add(place, 0.0, 8, None)
    outbox.opened(tuple(range(120)))
    assert admission.quotas.take("a", requests=0, sequences=0, tokens=0).remaining_tokens == 380
    requests.closed(outbox.request, Usage(prompt_tokens=120, completion_tokens=30))
    outbox.close(Usage(prompt_tokens=120, completion_tokens=30), 0.0, 0.0)
    assert admission.quotas.take("a", requests=0, sequences=0, tokens=0).remaining_tokens == 850
    (account, _) = admission.quotas.snapshot()
    assert (account.prompt_tokens, account.completion_tokens, account.inside) == (120, 30, 0)


def test_an_abort_costs_what_was_computed_also_when_the_reader_left_long_before() -> None:
    admission, clock = door(tokens_per_minute=1000)
    requests = OpenRequests(clock, lambda message: None)
    outbox = requests.add(admission.enter(want(tokens=100, max_tokens=500)), 0.0, 8, None)
    outbox.opened(tuple(range(100)))
    outbox.fail(RequestAborted("stalled"))
    assert admission.quotas.snapshot()[0].prompt_tokens == 0  # not known yet
    for _ in range(2):
        requests.closed(outbox.request, Usage(prompt_tokens=100, completion_tokens=7))
    account = admission.quotas.snapshot()[0]
    assert (account.prompt_tokens, account.completion_tokens) == (100, 7)
    assert admission.quotas.take("a", requests=0, sequences=0, tokens=0).remaining_tokens == 893


@pytest.mark.parametrize("leaves", [False, True])
def test_tokens_behind_a_stop_string_cost_nothing_whether_somebody_reads_the_usage_or_not(leaves: bool) -> None:
    admission, clock = door(tokens_per_minute=1000)
    requests = OpenRequests(clock, lambda message: None)
    outbox = requests.add(admission.enter(want(tokens=2, max_tokens=500)), 0.0, 1000, None)

    def settle(closed: RequestClosed) -> None:
        requests.closed(closed.request, closed.usage)

    core = OutputCore(TABLES, lambda message: None, 0.0, settle)
    beginning = opened(Slot(), request=outbox.request, stop_strings=("\n",))
    core.handle(msgspec.structs.replace(beginning, outbox=outbox), 0.0)
    shown, behind = [*ids("a"), *ids("\n")], ids("bcd")
    core.handle(step({10: [*shown, *behind]}), 0.0)
    core.handle(step({10: behind}), 0.0)
    if leaves:
        outbox.fail(RequestAborted("stalled"))
    usage = Usage(prompt_tokens=2, completion_tokens=len(shown) + 2 * len(behind))
    core.handle(step({}, closed=(msgspec.structs.replace(closed(outbox.request), usage=usage),)), 0.0)
    account = admission.quotas.snapshot()[0]
    assert (account.prompt_tokens, account.completion_tokens) == (2, len(shown))
    assert leaves or outbox.usage == msgspec.structs.replace(usage, completion_tokens=len(shown))
    assert admission.quotas.take("a", requests=0, sequences=0, tokens=0).remaining_tokens == 998 - len(shown)


def test_a_request_that_never_began_costs_no_tokens() -> None:
    admission, clock = door(tokens_per_minute=1000)
    requests = OpenRequests(clock, lambda message: None)
    refused = requests.add(admission.enter(want(tokens=300, max_tokens=100)), 0.0, 8, None)
    refused.fail(RequestAborted("not valid"))
    admission.enter(want(tokens=300)).leave()  # not handed over
    waited = requests.add(admission.enter(want(tokens=300)), 0.0, 8, None)
    waited.opened(tuple(range(300)))
    waited.fail(RequestAborted("waited too long"))
    unused = RequestClosed(
        request=waited.request,
        usage=Usage(prompt_tokens=300, completion_tokens=0),
        scheduled=None,
        first_token=None,
    )
    requests.closed(waited.request, unused.spent)
    assert admission.quotas.take("a", requests=0, sequences=0, tokens=0).remaining_tokens == 1000
    account = admission.quotas.snapshot()[0]
    assert (account.requests, account.prompt_tokens, account.inside) == (3, 0, 0)


def test_a_request_aborted_before_it_opened_is_charged_what_the_scheduler_reports() -> None:
    """The output actor may crash over the very message that opens a request which the scheduler knows already."""
    admission, clock = door(tokens_per_minute=1000)
    aborts: list[object] = []
    invalid: list[int] = []
    requests = OpenRequests(clock, aborts.append, on_invalid=lambda: invalid.append(1))
    outbox = requests.add(admission.enter(want(tokens=100, max_tokens=500)), 0.0, 8, None)
    requests.end(outbox, RequestAborted("the output processor crashed"))
    assert aborts == [AbortRequest(outbox.request)]
    requests.closed(outbox.request, Usage(prompt_tokens=100, completion_tokens=7))
    account = admission.quotas.snapshot()[0]
    assert (account.prompt_tokens, account.completion_tokens, account.inside) == (100, 7, 0)
    assert not invalid
    refused = requests.add(admission.enter(want()), 0.0, 8, None)
    refused.fail(InvalidRequest("not valid"))
    assert invalid == [1]


def test_a_prompt_longer_than_a_minute_allows_waits_for_a_full_bucket_and_leaves_debt() -> None:
    admission, clock = door(tokens_per_minute=60)
    admission.enter(want(tokens=600))
    with pytest.raises(RateLimited) as caught:
        admission.enter(want(tokens=1))
    assert caught.value.retry_after == pytest.approx(541)
    clock.time += 541
    admission.enter(want(tokens=1))


def test_unknown_names_leave_nothing_behind() -> None:
    admission, _ = door(requests_per_minute=1)
    for number in range(1000):
        admission.enter(want(f"stranger-{number}", tokens=0)).leave()
    assert [tenant.name for tenant in admission.quotas.snapshot()] == ["a", "b"]
    assert not admission._sequences._used
