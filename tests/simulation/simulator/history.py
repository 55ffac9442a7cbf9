"""The messages that each client got, checked against those that it should have got."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from simulator.faults import CRASHES, FAILING_TIER, TIERS, Injector
from simulator.model import Answer, Language, right_answer, right_selection
from simulator.workload import UNKNOWN, Ask, Pressure, Scenario
from troupellm.actors.client.stream import Stream
from troupellm.actors.engine.edges import SUPERVISION
from troupellm.actors.runtime.restart_intensity import Intensity
from troupellm.protocol.errors import ContextLengthExceeded, TroupeError
from troupellm.protocol.messages.cache_groups import longest_sequence
from troupellm.protocol.messages.snapshot import TenantSnapshot
from troupellm.protocol.params.outputs import Completion, Delta, Usage

Pairs = tuple[tuple[str, str], ...]

_RESTARTING: Pairs = tuple((actor, kind) for actor in ("intake", "output", "guide", "adapters") for kind in CRASHES)
_MOST_RESTARTS = Intensity().restarts
_MOST_LOSSES = SUPERVISION["worker"].intensity.restarts


class Record:
    """One client's history. `error` is what its stream raised; `left` says that it went away by itself."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.prompt: tuple[int, ...] = ()
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, list[str]] = {}
        self.ends: dict[int, tuple[str, int | str | None]] = {}
        self.error: TroupeError | None = None
        self.usage: Usage | None = None
        self.left = False
        self.stalled = False
        self.fell = False
        """So did the front that it came through."""
        self.stream: Stream | None = None
        """Once the client does not read any more."""
        self.request: int | None = None
        self.wrong: list[str] = []
        self.start = 0
        """`start_of` the adapter that its name stood for when it came."""
        self._right: dict[int, Answer] = {}

    @property
    def over(self) -> bool:
        """The engine has let go of it, which may be after its reader has left."""
        return self.stream is not None and (self.stream.finished or self.stream._outbox is None)

    @property
    def whole(self) -> bool:
        return self.usage is not None and self.error is None and not self.left

    def on_delta(self, delta: Delta, language: Language, prompt: tuple[int, ...], scenario: Scenario) -> None:
        """Append-only, and nothing but the right tokens in their order."""
        index = delta.index
        if index in self.ends:
            self.wrong.append(f"sequence {index} got a piece after its end")
        tokens = self.tokens.setdefault(index, [])
        tokens.extend(delta.token_ids)
        self.texts.setdefault(index, []).append(delta.text)
        if delta.finish_reason is not None:
            self.ends[index] = (delta.finish_reason, delta.stop_reason)
        self.prompt = prompt
        right = self.right(language, index, scenario)
        if tuple(tokens) != right.token_ids[: len(tokens)]:
            self.wrong.append(f"sequence {index} says {tokens}, right is {right.token_ids}")
        text = "".join(self.texts[index])
        if text != right.text[: len(text)]:
            self.wrong.append(f"sequence {index} reads {text!r}, right is {right.text!r}")

    def on_completion(self, completion: Completion, language: Language, scenario: Scenario) -> None:
        """Of a request whose answer is chosen among several."""
        self.prompt = completion.prompt_token_ids
        said = [
            Answer(choice.token_ids, choice.text, str(choice.finish_reason), choice.stop_reason)
            for choice in completion.choices
        ]
        right = right_selection(language, self.prompt, self.ask.params, self._most_tokens(scenario), self.start)
        if said != list(right):
            self.wrong.append(f"the choices are {said}, right is {right}")

    def _most_tokens(self, scenario: Scenario) -> int:
        return self.ask.params.max_tokens or scenario.pressure.max_model_len - len(self.prompt)

    def right(self, language: Language, index: int, scenario: Scenario) -> Answer:
        answer = self._right.get(index)
        if answer is None:
            most = self._most_tokens(scenario)
            answer = self._right[index] = right_answer(language, self.prompt, self.ask.params, index, most, self.start)
        return answer

    def check(self, language: Language, scenario: Scenario, injector: Injector, blamed: set[int]) -> list[str]:
        """The errors of this history, once it is over."""
        if not self.over:
            return [*self.wrong, "no end within the bound"]
        if self.error is not None:
            reason = self._unjustified(scenario, injector, blamed)
            return self.wrong if reason is None else [*self.wrong, reason]
        if self.left:
            return self.wrong
        if self.usage is None:
            return [*self.wrong, "ended without a word"]
        return [*self.wrong, *self._incomplete(language, scenario)]

    def _incomplete(self, language: Language, scenario: Scenario) -> list[str]:
        wrong = []
        for index in range(0 if self.ask.params.selects else self.ask.params.n):
            right = self.right(language, index, scenario)
            said = (tuple(self.tokens.get(index, ())), "".join(self.texts.get(index, ())), self.ends.get(index))
            if said != (right.token_ids, right.text, (right.finish_reason, right.stop_reason)):
                wrong.append(f"sequence {index} ended as {said}, right is {right}")
        assert self.usage is not None
        if self.usage.prompt_tokens != len(self.prompt) or self.usage.cached_tokens > len(self.prompt):
            wrong.append(f"usage {self.usage} for a prompt of {len(self.prompt)}")
        used = sum(map(len, self.tokens.values()))
        if not self.ask.params.selects and self.usage.completion_tokens != used:
            wrong.append(f"usage {self.usage} for {used} tokens")
        return wrong

    def _unjustified(self, scenario: Scenario, injector: Injector, blamed: set[int]) -> str | None:
        """Why this error should not have come; None when a fault, or the request itself, accounts for it."""
        error, ask = self.error, self.ask
        happened = injector.happened
        fatal = may_end(injector)
        unlucky = injector.failures > 1  # it may have been alone with the worker each time
        code = error.code if error is not None else ""
        match code:
            case "context_length_exceeded":
                right = isinstance(error, ContextLengthExceeded) and too_long(ask, scenario)
            case "invalid_value":
                right = ask.params.use_beam_search and ask.params.num_sequences > scenario.config.scheduler.max_num_seqs
            case "integer_above_max_value":
                mine = [tenant for tenant in scenario.config.scheduler.tenants if tenant.name == ask.tenant]
                right = any(ask.params.num_sequences > (tenant.max_concurrency or math.inf) for tenant in mine)
            case "slow_down":
                right = not ask.wait
            case "rate_limit_exceeded":
                right = any(tenant.name == ask.tenant for tenant in scenario.config.scheduler.tenants)
            case "reader_stalled":
                stalled = self.stalled or (ask.front and happened(("front", "slow")))
                right = stalled and bool(scenario.config.stream.stall_timeout)
            case "engine_request_failed":
                right = self.request in blamed or happened(("pool", "exception"), *_RESTARTING[:3])
                right = right or (unlucky and injector.failures > injector.hits["worker", "poison"])
            case "server_is_overloaded":
                right = ask.deadline is not None or (unlucky and happened(("worker", "allocation")))
                right = right or happened(("adapters", "late"), *_RESTARTING[-len(CRASHES) :])
            case "model_not_found":
                right = ask.adapter == UNKNOWN
            case "invalid_adapter":
                right = happened(("adapters", "refused"))
            case "engine_restarting":
                right = happened(*_RESTARTING) or fatal
            case "asleep":
                right = not ask.wait and happened(*((tier, "sleep") for tier in TIERS))
            case "kv_load_failed":
                right = FAILING_TIER in scenario.pressure.outer
            case "engine_failed":
                right = fatal or self.fell
            case "draining":
                right = happened(("engine", "drain")) or fatal
            case _:
                right = False
        return None if right else f"failed with {code}: {error}"


def may_end(injector: Injector) -> bool:
    """Whether what happened may end the engine."""
    return injector.fatal or injector.most_crashes() > _MOST_RESTARTS or injector.losses > _MOST_LOSSES


def too_long(ask: Ask, scenario: Scenario) -> bool:
    """Whether a request can never be served."""
    pressure, params = scenario.pressure, ask.params
    prompt = prompt_length(ask)
    total = prompt + (params.max_tokens or 1)
    scheduler, windows = scenario.config.scheduler, pressure.windows
    num_blocks, span = pressure.num_blocks * len(windows), scheduler.max_num_batched_tokens
    limit = min(pressure.max_model_len, longest_sequence(windows, num_blocks, span, pressure.block_size))
    unchunked = not scheduler.enable_chunked_prefill and prompt > scheduler.max_num_batched_tokens
    return total > limit or unchunked or (params.use_beam_search and not _beams_fit(ask, pressure))


def _beams_fit(ask: Ask, pressure: Pressure) -> bool:
    """All beams must fit at once; the full blocks of the prompt are shared, the last token is never computed."""
    prompt, size = prompt_length(ask), pressure.block_size
    shared = prompt // size
    longest = min(prompt + (ask.params.max_tokens or 1), pressure.max_model_len) - 1
    return shared + ask.params.num_sequences * (-(-longest // size) - shared) <= pressure.num_blocks


def check_accounts(
    accounts: Iterable[TenantSnapshot],
    told: Mapping[int, tuple[str, Usage]],
    records: Mapping[int | None, Record],
) -> list[str]:
    """9: tenants have used what the usage of their requests says. Where the reader never heard of it that is what the
    scheduler told, but for what was behind a stop string.

    Args:
        told: by request.
        records: by request; those of None never came that far.
    """
    least: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for request, (tenant, usage) in told.items():
        record = records.get(request)
        heard = None if record is None else record.usage
        sure = heard is not None or record is None or not record.ask.params.stop_strings
        usage = usage if heard is None else heard
        least[tenant] += usage.prompt_tokens + (usage.completion_tokens if sure else 0)
        most[tenant] += usage.prompt_tokens + usage.completion_tokens
    return [
        f"9: {account} at the end, {least[account.name]} to {most[account.name]} tokens were used"
        for account in accounts
        if account.inside
        or not least[account.name] <= account.prompt_tokens + account.completion_tokens <= most[account.name]
    ]


def prompt_length(ask: Ask) -> int:
    prompt = ask.prompt
    ids: Sequence[object] = getattr(prompt, "token_ids", None) or getattr(prompt, "text", "")
    return len(ids)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one seed."""

    seed: int
    failures: tuple[str, ...]
    hits: dict[tuple[str, str], int]
    trace: tuple[tuple[object, ...], ...]
    virtual_seconds: float
    steps: int
    finished: int
    """Requests that got their whole answer."""
    preemptions: int
    accepted: int
    """Drafts."""
    loads: int
    """Blocks that began to come back from host memory."""
    leased: int
    """Blocks whose leases have ended, or go on."""
    prefetched: int
    """Blocks that prefetches have brought."""
