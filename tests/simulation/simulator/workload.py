"""The events of one seed apart from its faults: the engine's settings, and the clients' requests."""

import typing
from collections.abc import Sequence
from random import Random

import msgspec

from simulator.faults import Fault, draw_faults
from simulator.model import CHUNKS, FIRST_TEXT_TOKEN
from troupellm.protocol.config.engine import EngineConfig, SchedulerConfig
from troupellm.protocol.config.kv_hints import NO_HINTS, KVHints
from troupellm.protocol.messages.input import Prompt, TextPrompt, TokensPrompt
from troupellm.protocol.params.sampling import SamplingParams

POLICIES: tuple[str, ...] = typing.get_args(typing.get_type_hints(SchedulerConfig)["scheduling_policy"])
TORCH_SHARE = 0.02
STEP_TIMEOUT = 2.0
STALL_TIMEOUT = 3.0
WATCHDOG_TIMEOUT = 3.0
_PREFIXES = tuple(tuple(Random(number).choices(range(FIRST_TEXT_TOKEN, 30), k=12)) for number in range(3))
_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None,), (None,), (None, None), (None, 5), (3,), (6, None, 2))
_STOPS = ("a", "the", "é", "zz", "ab", "q")


UNKNOWN = "unknown"
"""Name of an adapter that there is not."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One client and its request. Times are seconds."""

    number: int
    start: float
    prompt: Prompt
    params: SamplingParams
    wait: bool
    streaming: bool
    salt: bytes
    tenant: str
    deadline: float | None
    calm: bool = False
    """Sent in the calm phase, to see whether the engine lives."""
    front: bool = False
    """Through a front process."""
    hints: KVHints = NO_HINTS
    adapter: str = ""
    """Name of a LoRA adapter; empty is the model itself."""
    told: str = ""
    """The hint about the session: prefetch it before the request, keep or drop it after."""


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the worker and of the mailboxes."""

    num_blocks: int
    block_size: int
    max_model_len: int
    windows: tuple[int | None, ...]
    """The window of each cache group."""
    smallest_mailboxes: bool
    """Every mailbox that a sender may wait for takes one message."""
    step_seconds: float
    torch: bool
    """The tiny torch model computes, instead of the oracle."""
    process: bool = False
    """The worker sits in a process of its own."""
    spare: bool = False
    """Another process waits beside it."""
    drafts: int = 0
    """That the worker verifies of a row in one step, at most; 0: it drafts nothing."""
    hit_rate: float = 0.0
    """How likely each of them is accepted."""
    state_slots: int = 0
    """States that the worker holds; 0: the model has none."""
    host_slots: int = 0
    """Blocks that host memory holds; 0: there are no tiers."""
    outer: tuple[str, ...] = ()
    """Tiers behind host memory."""
    transfer_speed: float = 1.0
    """How likely a transfer ends with each plan."""
    fronts: int = 0
    """Front processes."""
    loras: int = 0
    """Adapter slots; 0: no adapters are served."""
    ahead: bool = False
    """A worker on a thread has a device that computes by itself."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    config: EngineConfig
    pressure: Pressure
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def draw_scenario(seed: int) -> Scenario:
    random = Random(seed)
    block_size = random.choice((1, 2, 4, 4, 8))
    context = random.choice((16, 32, 32, 48))
    capacity = random.choice((context, context, context + 8, 2 * context, 8 * context))
    torch = random.random() < TORCH_SHARE
    pressure = Pressure(
        num_blocks=-(-capacity // block_size),
        block_size=block_size,
        max_model_len=context,
        windows=(None,) if torch else random.choice(_WINDOWS),
        smallest_mailboxes=random.random() < 0.5,
        step_seconds=random.choice((0.001, 0.005, 0.03)),
        torch=torch,
        ahead=Random(seed ^ 0xA4EAD).random() < 0.5,
    )
    asks = [_draw_ask(random, number, context) for number in range(random.choice((1, 2, 3, 4, 6, 9)))]
    asks += [_draw_ask(random, len(asks) + extra, context, calm=True) for extra in range(2)]
    return Scenario(
        seed=seed,
        config=_draw_config(random, block_size),
        pressure=pressure,
        asks=tuple(asks),
        faults=draw_faults(random),
    )


def _draw_config(random: Random, block_size: int) -> EngineConfig:
    return EngineConfig.from_flat(
        {
            "block_size": block_size,
            "enable_prefix_caching": random.random() < 0.7,
            "max_num_seqs": random.choice((1, 2, 3, 8)),
            "max_num_batched_tokens": random.choice((1, 2, 4, 8, 64)),
            "enable_chunked_prefill": random.random() < 0.9,
            "max_num_queued_reqs": random.choice((0, 2, 16)),
            "scheduling_policy": random.choice(POLICIES),
            "max_plans_in_flight": random.choice((1, 2)),
            "max_num_prefill_tokens": random.choice(("auto", "auto", 1, 4, 16)),
            "stream_budget_tokens": random.choice((1, 2, 4, 64)),
            "flush_interval": random.choice((0.0, 0.0, 0.02)),
            "stall_timeout": random.choice((0.0, STALL_TIMEOUT)),
            "step_timeout": STEP_TIMEOUT,
            "watchdog_timeout": WATCHDOG_TIMEOUT,
        }
    )


def _draw_ask(random: Random, number: int, context: int, *, calm: bool = False) -> Ask:
    longest = random.choice((3, 8, context))
    prefix = random.choice(((), (), *_PREFIXES))[: random.choice((4, 8, 12))]
    tail = random.choices(range(FIRST_TEXT_TOKEN, len(CHUNKS)), k=1 + random.randrange(longest))
    prompt = prompt_of(prefix, tail)
    if random.random() < 0.15:
        prompt = TextPrompt("".join(random.choices("abcdefgh the", k=1 + random.randrange(10))))
    return Ask(
        number=number,
        start=random.choice((0.0, 0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 1.0))),
        prompt=prompt,
        params=_draw_params(random),
        wait=random.random() < 0.7,
        streaming=random.random() < 0.8,
        salt=random.choice((b"", b"", b"", b"salt")),
        tenant=random.choice(("", "", "one", "two")),
        deadline=None if calm or random.random() < 0.9 else random.choice((0.0, 0.05, 1.0)),
        calm=calm,
    )


def prompt_of(*parts: Sequence[int]) -> Prompt:
    """Token ids, part after part."""
    return TokensPrompt(tuple(token for part in parts for token in part))


def _draw_params(random: Random) -> SamplingParams:
    max_tokens = random.choice((1, 2, 4, 8, 12, 20))
    stop: Sequence[str] | None = None
    if random.random() < 0.25:
        stop = random.sample(_STOPS, random.choice((1, 2)))
    sampled = random.random() < 0.5
    return SamplingParams(
        n=random.choice((1, 1, 1, 1, 2, 3)),
        temperature=1.0 if sampled else 0.0,
        seed=random.getrandbits(32) if sampled else None,
        stop=stop,
        stop_token_ids=random.choices(range(len(CHUNKS)), k=2) if random.random() < 0.25 else None,
        include_stop_str_in_output=random.random() < 0.2,
        ignore_eos=random.random() < 0.5,
        max_tokens=max_tokens,
        min_tokens=random.choice((0, 0, 0, min(3, max_tokens))),
        bad_words=["x" * 501] if random.random() < 0.05 else None,
        priority=random.choice((0, 0, 1)),
    )
