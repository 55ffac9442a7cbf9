"""Additions to the workload of half of the seeds: KV hints, which must change no answer and lose no block.

Drawn apart, so that a seed without them stays what it was.
"""

from random import Random
from typing import TYPE_CHECKING

import msgspec

from simulator.workload import Ask, Scenario
from troupellm.protocol.config.kv_hints import DropSession, KeepTurn, KVHints, LeaseConfig, PrefetchSession, PrefixLease
from troupellm.protocol.messages.input import TokensPrompt

if TYPE_CHECKING:
    from simulator.world import World

HINTED_SHARE = 0.5
_SECONDS = (0.05, 0.5, 60.0)


def hinted(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario, whose clients name sessions and lease prefixes."""
    leases = LeaseConfig(
        kv_lease_fraction=random.choice((0.1, 0.5, 0.5, 1.0)), tool_lease=random.choice((0.0, *_SECONDS))
    )
    config = msgspec.structs.replace(scenario.config, leases=leases)
    asks = tuple(_hinting(random, ask) for ask in scenario.asks)
    return msgspec.structs.replace(scenario, config=config, asks=asks)


def _hinting(random: Random, ask: Ask) -> Ask:
    prompt = ask.prompt
    if isinstance(prompt, TokensPrompt) and random.random() < 0.6:
        ends = sorted(random.randrange(len(prompt.token_ids) + 9) for _ in range(random.randint(1, 4)))
        leases = tuple(PrefixLease(end, random.choice(_SECONDS)) for end in ends)
        prompt = msgspec.structs.replace(prompt, leases=leases)
    hints = KVHints(session=random.choice(("", "one", "two")), retain=random.choice((0.0, 0.0, 60.0)))
    told = random.choice(("", "keep", "prefetch", "prefetch", "drop")) if hints.session else ""
    return msgspec.structs.replace(ask, prompt=prompt, hints=hints, told=told)


def tell(world: "World", ask: Ask, *, before: bool) -> None:
    """Send the client's hints about its session, before or after its request."""
    name = ask.tenant, ask.hints.session
    scheduler = world.system.scheduler
    if not ask.told or before != (ask.told == "prefetch") or scheduler.closed:
        return
    world.note("client", ask.number, ask.told, name)
    if ask.told == "keep":
        scheduler.control(KeepTurn(*name))
    elif ask.told == "prefetch":
        scheduler.control(PrefetchSession(*name, lambda report: world.note("prefetched", ask.number, report)))
    else:
        scheduler.control(DropSession(*name, lambda blocks: world.note("dropped", ask.number, blocks)))
