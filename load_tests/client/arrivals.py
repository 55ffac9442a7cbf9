"""When requests are sent: a schedule that is drawn before the run and never waits for replies."""

import math
from typing import Literal

RampUp = Literal["linear", "exponential"]


def arrival_times(
    count: int,
    rate: float,
    *,
    burstiness: float = 1.0,
    ramp_up: RampUp | None = None,
    start_rps: float = 0.0,
    end_rps: float = 0.0,
    seed: int = 0,
) -> list[float]:
    """Seconds from the start of the run, rising, one per request.

    Gaps are gamma distributed with shape `burstiness` (1 is a Poisson process, higher is more regular, lower comes in
    bursts). Without a ramp they are scaled so that the last request leaves after exactly count / rate seconds: runs
    with the same rate then offer the same load. With a ramp the rate goes from `start_rps` to `end_rps` over the run.
    """
    import numpy as np

    if count == 0 or (ramp_up is None and math.isinf(rate)):
        return [0.0] * count
    generator = np.random.default_rng(seed)
    if ramp_up is None:
        rates = np.full(count, rate)
    elif ramp_up == "linear":
        rates = np.linspace(start_rps, end_rps, count)
    else:
        rates = np.geomspace(start_rps, end_rps, count)
    times = np.cumsum(generator.gamma(burstiness, 1.0 / (rates * burstiness)))
    if ramp_up is None:
        times *= count / rate / times[-1]
    return [float(time) for time in times]
