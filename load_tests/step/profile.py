"""The parts of a step: how many operators it calls or kernels it launches, and how much of it passes outside."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median

import msgspec
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from troupellm.load_tests.step.bare import Around

PROFILED_STEPS = 16
STEP = "troupe::step"


class Parts(msgspec.Struct, frozen=True):
    """Of one step; medians over the profiled ones, so that a step that another program spoilt does not count."""

    kernels: int
    """On a CPU operators: those of torch, and what we compute instead of them by compiled code (`native::` in the
    profile, the call for all layers is one) or by numpy (`host::`). On a GPU its kernels."""
    outside: float
    """Share of the step outside of them, which is the interpreter's and what the profiler itself takes between them;
    of a CPU alone, where nothing runs beside the host."""
    outside_us: float
    """The same in microseconds."""


def parts_of(decode: Callable[[int, Around], object], device: torch.device) -> Parts:
    """Profile `decode(steps, around)`, which takes each step within an `around()`."""
    if device.type == "cuda":
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
            decode(PROFILED_STEPS, nullcontext)
        kernels = sum(event.device_type == DeviceType.CUDA for event in profile.events() or [])
        return Parts(round(kernels / PROFILED_STEPS), 0.0, 0.0)
    return parts_of_steps(recorded_steps(decode))


def recorded_steps(decode: Callable[[int, Around], object]) -> list[FunctionEvent]:
    """Steps on a CPU; their children are their outermost operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decode(PROFILED_STEPS, lambda: torch.profiler.record_function(STEP))
    return [event for event in profile.events() or [] if event.name == STEP]


def parts_of_steps(steps: Sequence[FunctionEvent]) -> Parts:
    """Of `recorded_steps`."""
    spent = [(step.cpu_time_total, sum(part.cpu_time_total for part in step.cpu_children)) for step in steps]
    return Parts(
        round(median(len(step.cpu_children) for step in steps)),
        median(1.0 - inside / whole for whole, inside in spent),
        median(whole - inside for whole, inside in spent),
    )
