"""What a step is made of: how many kernels it launches, and how much of it passes outside of them."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch._C._autograd import DeviceType

from troupellm.kernels.native import Library

PROFILED_STEPS = 8


class Parts(msgspec.Struct, frozen=True):
    """Of one step."""

    kernels: int
    """Torch's operators and compiled functions on a CPU, kernels on a GPU."""
    outside: float
    """Share of the step outside of them; of a CPU alone, where nothing runs beside the host."""


class _Traced:
    """Compiled functions told to torch's profiler, which does not see them by itself; while it is on only."""

    recording = False


def trace_native() -> None:
    """From here on. Call it before anything loads the library."""
    original = Library.function

    def function(self: Library, name: str, arguments: str) -> Callable[..., None]:
        found = original(self, name, arguments)

        def call(*values: Any) -> None:
            if not _Traced.recording:
                found(*values)
                return
            with torch.profiler.record_function(f"native::{name}"):
                found(*values)

        return call

    Library.function = function  # type: ignore[method-assign]


def parts_of(run: Callable[[int], object], device: torch.device) -> Parts:
    """Profile `run(steps)`."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    run(2)
    _Traced.recording = True
    try:
        with torch.profiler.profile(activities=wanted) as profile:
            begin = time.perf_counter()
            run(PROFILED_STEPS)
            seconds = time.perf_counter() - begin
    finally:
        _Traced.recording = False
    events = profile.events() or []
    if device.type == "cuda":
        kernels = sum(event.device_type == DeviceType.CUDA for event in events)
        return Parts(round(kernels / PROFILED_STEPS), 0.0)
    outermost = [event for event in events if event.cpu_parent is None]
    inside = sum(event.cpu_time_total for event in outermost) * 1e-6
    return Parts(round(len(outermost) / PROFILED_STEPS), max(0.0, 1.0 - inside / seconds))
