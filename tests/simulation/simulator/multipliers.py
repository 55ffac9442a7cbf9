"""Additions to the workload of a part of the seeds: drafts that are verified, states, and tiers behind
the cache.

Drawn apart, so that a seed without them stays what it was. Drafts and tiers are drawn independently of each other.
"""

from random import Random

import msgspec

from simulator.extras import draw_extended
from simulator.faults import HOST, HOST_FAULTS, OUTER_FAULTS, Fault
from simulator.hinted import HINTED_SHARE, hinted
from simulator.model import CHUNKS, FIRST_TEXT_TOKEN
from simulator.stateful import STATEFUL_SHARE, stateful
from simulator.workload import Ask, Scenario, prompt_of
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.kv_offload import OffloadConfig
from troupellm.protocol.config.speculation import SpeculativeConfig

DRAFTING_SHARE = 0.4
TIERED_SHARE = 0.45
_OUTER = ((), ("disk",), ("peer",), ("peer",), ("disk", "peer"), ("disk", "peer"))
_OF_FETCHES = ("load_error", "late", "corrupt", "short", "missing")
"""Few blocks come from outer tiers, so their first one is an occasion, and such faults are drawn more often."""
_RARE = ("late", "killed", "reset", "sleep")
"""They need a transfer of their tier under way, of which there are few, so they have a draw of their own."""
_LONG_PREFIXES = tuple(tuple(Random(number).choices(range(FIRST_TEXT_TOKEN, 30), k=24)) for number in range(10, 12))


def draw_whole(seed: int) -> Scenario:
    """A seed with extras, drafts and tiers, where it has them."""
    scenario = draw_extended(seed)
    if scenario.pressure.torch:
        return scenario
    if Random(seed ^ 0xD4AF).random() < DRAFTING_SHARE:
        scenario = drafting(scenario, Random(seed ^ 0xD4A0))
    elif Random(seed ^ 0x57A7E).random() < STATEFUL_SHARE:
        scenario = stateful(scenario, Random(seed ^ 0x57A70))
    if Random(seed ^ 0x71E4).random() < TIERED_SHARE:
        scenario = tiered(scenario, Random(seed ^ 0x71E0))
    if Random(seed ^ 0x1EA5E).random() < HINTED_SHARE:
        scenario = hinted(scenario, Random(seed ^ 0x1EA50))
    return scenario


def drafting(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario, whose worker verifies drafts."""
    drafts = random.choice((1, 2, 3, 5, 8))
    schedule = random.choice(((), (), ((1, 1, drafts), (2, 3, 1), (4, 64, 0))))
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, num_speculative_tokens_per_batch_size=schedule
    )
    config = scenario.config
    speculation = msgspec.structs.replace(config.speculation, speculative_config=speculative)
    scheduler = config.scheduler
    if scheduler.max_num_batched_tokens < 4 and random.random() < 0.8:  # there is no room for drafts in tiny steps
        scheduler = msgspec.structs.replace(scheduler, max_num_batched_tokens=random.choice((8, 16, 64)))
    pressure = msgspec.structs.replace(
        scenario.pressure, drafts=drafts, hit_rate=random.choice((0.0, 0.3, 0.7, 0.9, 1.0))
    )
    config = msgspec.structs.replace(config, speculation=speculation, scheduler=scheduler)
    return msgspec.structs.replace(scenario, config=config, pressure=pressure)


def tiered(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario with tiers behind a smaller cache, and with prompts that others have asked before."""
    old, outer = scenario.pressure, random.choice(_OUTER)
    tight = -(-old.max_model_len // old.block_size)
    pressure = msgspec.structs.replace(
        old,
        num_blocks=random.choice((tight, tight, tight + 4, old.num_blocks)),
        host_slots=random.choice((2, 4, 6, 16)) * len(old.windows),
        outer=outer,
        transfer_speed=random.choice((1.0, 0.7, 0.3)),
    )
    asks = [_again(random, ask, old.max_model_len) for ask in scenario.asks]
    models = [ask for ask in asks if not ask.calm]
    for _ in range(random.choice((2, 6, 12))):  # who comes back when others have pushed its blocks out
        ask = _again(random, random.choice(models), old.max_model_len)
        asks.append(msgspec.structs.replace(ask, number=len(asks), start=random.uniform(0.0, 1.0)))
    faults = (*scenario.faults, *_draw_tier_faults(random, scenario, outer)) if scenario.faults else ()
    return msgspec.structs.replace(
        scenario, config=_config(random, scenario.config), pressure=pressure, asks=tuple(asks), faults=faults
    )


def _config(random: Random, config: EngineConfig) -> EngineConfig:
    offload = OffloadConfig(
        kv_offloading_size=1.0,
        kv_offload_policy=random.choice(("lru", "arc")),
        kv_offload_store_threshold=random.choice((0, 0, 0, 2)),
        kv_offload_timeout=random.choice((0.05, 0.5, 5.0)),
        preemption_mode=random.choice(("auto", "recompute", "offload")),
    )
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=True)
    return msgspec.structs.replace(config, offload=offload, cache=cache)


def _again(random: Random, ask: Ask, context: int) -> Ask:
    """Most prompts begin like others, for several blocks."""
    if random.random() < 0.2:
        return ask
    prefix = random.choice(_LONG_PREFIXES)[: random.choice((8, context // 2, context // 2))]
    tail = random.choices(range(FIRST_TEXT_TOKEN, len(CHUNKS)), k=random.choice((1, 1, 2, 5)))
    start = ask.start if random.random() < 0.5 else random.uniform(0.0, 2.0)
    return msgspec.structs.replace(ask, prompt=prompt_of(prefix, tail), salt=b"", start=start)


def _draw_tier_faults(random: Random, scenario: Scenario, outer: tuple[str, ...]) -> list[Fault]:
    faults = []
    pauses = any(fault.kind in ("pause", "drain") for fault in scenario.faults)
    rests = pauses or scenario.pressure.process  # a process is told of no commands here; one rest at a time is enough
    for _ in range(random.choice((1, 2, 3, 4, 5))):
        target = random.choice((HOST, *outer, *outer))
        kind = random.choice(HOST_FAULTS if target == HOST else (*OUTER_FAULTS, *_OF_FETCHES, *_OF_FETCHES))
        if kind == "sleep" and rests:
            continue
        at = 1 if kind in _OF_FETCHES else 1 + int(random.expovariate(0.7))
        span = random.choice((1, 1, 2, 5))
        faults.append(Fault(target, kind, at, 1 if kind in ("killed", "reset", "sleep", "late") else span))
    apart = Random(scenario.seed ^ 0x7A8E)
    if apart.random() < 0.5:
        kind = apart.choice(_RARE) if outer else "late"
        if kind != "sleep" or not rests:
            faults.append(Fault((*outer, HOST)[0], kind, apart.choice((1, 1, 2))))
    return faults
