"""What a step is made of: how many kernels it launches, and how much of it passes outside of them."""

import time
from collections.abc import Callable

import msgspec
import torch
from torch._C._autograd import DeviceType

PROFILED_STEPS = 8


class Parts(msgspec.Struct, frozen=True):
    """Of one step."""

    kernels: int
    """Torch's operators and compiled functions on a CPU, kernels on a GPU."""
    outside: float
    """Share of the step outside of them; of a CPU alone, where nothing runs beside the host."""


def parts_of(run: Callable[[int], object], device: torch.device) -> Parts:
    """Profile `run(steps)`."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    run(2)
    with torch.profiler.profile(activities=wanted) as profile:
        begin = time.perf_counter()
        run(PROFILED_STEPS)
        seconds = time.perf_counter() - begin
    events = profile.events() or []
    if device.type == "cuda":
        kernels = sum(event.device_type == DeviceType.CUDA for event in events)
        return Parts(round(kernels / PROFILED_STEPS), 0.0)
    outermost = [event for event in events if event.cpu_parent is None]
    inside = sum(event.cpu_time_total for event in outermost) * 1e-6
    return Parts(round(len(outermost) / PROFILED_STEPS), max(0.0, 1.0 - inside / seconds))
