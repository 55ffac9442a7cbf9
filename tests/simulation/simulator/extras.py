"""Additions to the plain workload of half of the seeds: searches, best_of, guides, tenants with limits, a worker
process, a pause.

Drawn apart from the rest, so that a seed without extras stays what it was.
"""

from random import Random

import msgspec

from simulator.faults import GUIDE_FAULTS, PROCESS_FAULTS, PROCESS_LOSSES, Fault
from simulator.model import ToyGuide
from simulator.workload import Ask, Scenario, draw_scenario
from troupellm.protocol.config.engine import TenantConfig
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.sampling import SamplingParams

EXTENDED_SHARE = 0.5


def draw_extended(seed: int) -> Scenario:
    """A seed with its extras, if it has any."""
    scenario, random = draw_scenario(seed), Random(seed ^ 0xBEA4)
    if random.random() >= EXTENDED_SHARE:
        return scenario
    return extended(scenario, random)


def extended(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario with extras."""
    pressure, asks, faults = scenario.pressure, scenario.asks, scenario.faults
    if random.random() < 0.6 and not pressure.torch:
        asks = tuple(_searching(random, ask) for ask in asks)
    if random.random() < 0.4 and not pressure.torch:
        asks = tuple(_guided(random, ask) for ask in asks)
        for _ in range(random.choice((0, 1, 2)) if faults else 0):
            kind, span = random.choice(GUIDE_FAULTS), random.choice((1, 1, 2))
            at = random.choice((1, 1, 2, 3))
            faults = (
                *faults,
                Fault("guide", kind, at, 1 if kind == "lost_wakeup" else span, random.choice((0.02, 0.5))),
            )
    if random.random() < 0.15 and faults:
        faults = (*faults, Fault("engine", "pause", 1))
    config = scenario.config
    if random.random() < 0.6:
        tenants = tuple(_draw_tenant(random, name) for name in ("one", "two"))
        scheduler = msgspec.structs.replace(config.scheduler, tenants=tenants)
        config = msgspec.structs.replace(config, scheduler=scheduler)
    if random.random() < 0.5 and not pressure.torch:
        pressure = msgspec.structs.replace(pressure, process=True, spare=random.random() < 0.5)
        for _ in range(random.choice((0, 1, 1, 2)) if faults else 0):
            kind, at = random.choice(PROCESS_FAULTS), 1 + int(random.expovariate(0.2))
            if kind in PROCESS_LOSSES:
                faults = (*faults, Fault("process", kind, at))
            else:  # what can only go wrong with a successor
                faults = (*faults, Fault("process", kind, 1), Fault("process", "signal", at))
    return msgspec.structs.replace(scenario, pressure=pressure, asks=asks, faults=faults, config=config)


def _searching(random: Random, ask: Ask) -> Ask:
    """A third of the requests choose their answers among several sequences."""
    kind, old = random.choice(("", "", "", "", "beams", "best_of")), ask.params
    if not kind:
        return ask
    width = random.choice((1, 2, 3))
    if kind == "beams":
        params = SamplingParams(
            n=random.randint(1, width),
            best_of=width,
            use_beam_search=True,
            temperature=0.0,
            length_penalty=random.choice((1.0, 1.0, 0.0, 2.0, -1.0)),
            early_stopping=random.random() < 0.5,
            include_stop_str_in_output=old.include_stop_str_in_output,
            ignore_eos=old.ignore_eos,
            max_tokens=old.max_tokens,
            priority=old.priority,
        )
    else:
        params = msgspec.structs.replace(old, n=width, best_of=width + random.choice((1, 2)))
    return msgspec.structs.replace(ask, params=params, streaming=False)


def _guided(random: Random, ask: Ask) -> Ask:
    """Half of those that are no searches; few guides, so that some wait for the same."""
    if ask.params.use_beam_search or random.random() < 0.5:
        return ask
    guide = ToyGuide(random.randrange(3), random.choice((1, 3, 6)))
    params = msgspec.structs.replace(ask.params, guide=GuideSpec(kind="regex", source=guide.text))
    return msgspec.structs.replace(ask, params=params)


def _draw_tenant(random: Random, name: str) -> TenantConfig:
    return TenantConfig(
        name=name,
        weight=random.choice((1.0, 1.0, 0.5, 4.0)),
        priority=random.choice((0, 0, -1, 1)),
        requests_per_minute=random.choice((None, None, 2, 60)),
        tokens_per_minute=random.choice((None, None, 60, 2000)),
        max_concurrency=random.choice((None, None, 1, 3)),
    )
