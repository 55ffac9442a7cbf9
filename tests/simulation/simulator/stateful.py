"""A model with states beside its KV cache, for a part of the seeds; drawn apart, as the other additions are."""

from random import Random

import msgspec

from simulator.workload import Ask, Scenario
from troupellm.protocol.params.sampling import SamplingParams

STATEFUL_SHARE = 0.3


def stateful(scenario: Scenario, random: Random) -> Scenario:
    """The same scenario, whose worker has states. Such models take no drafts, and no beams yet."""
    scheduler, size = scenario.config.scheduler, scenario.pressure.block_size
    slots = random.choice((1, 2, scheduler.max_num_seqs, scheduler.max_num_seqs + 4, 64))
    scheduler = msgspec.structs.replace(scheduler, state_snapshot_interval=size * random.choice((0, 1, 2, 5)))
    return msgspec.structs.replace(
        scenario,
        config=msgspec.structs.replace(scenario.config, scheduler=scheduler),
        pressure=msgspec.structs.replace(scenario.pressure, state_slots=slots),
        asks=tuple(_without_beams(ask) for ask in scenario.asks),
    )


def _without_beams(ask: Ask) -> Ask:
    if not ask.params.use_beam_search:
        return ask
    old = ask.params
    params = SamplingParams(n=old.n, temperature=0.0, max_tokens=old.max_tokens, ignore_eos=old.ignore_eos)
    return msgspec.structs.replace(ask, params=params)
