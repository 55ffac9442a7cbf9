"""How many tokens fill the device."""

from collections.abc import Callable

import pytest

from troupellm.models.runner.saturation import LEAST_TOKENS, SIZES, measure


class Device:
    """Steps take `fixed` seconds and `per_token` more for each token, on a clock of its own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.sizes: list[int] = []

    def clock(self) -> float:
        return self.now

    def run(self, size: int) -> None:
        self.sizes.append(size)
        self.now += self.seconds(size)

    def measure(self, most: int = 10**6) -> tuple[int, float]:
        return measure(self.run, most, clock=self.clock)


@pytest.mark.parametrize(
    ("per_token", "knee", "expected"), [(25e-5, 32, 128), (25e-5, 100, 128), (25e-5, 200, 256), (15e-5, 512, 512)]
)
def test_the_knee_of_the_roofline_is_found(per_token: float, knee: int, expected: int) -> None:
    """Up to the knee, steps of every size take equally long."""
    tokens, seconds = Device(lambda size: per_token * max(size, knee)).measure()
    assert tokens == expected
    assert seconds == pytest.approx(per_token * max(expected, knee))


@pytest.mark.parametrize(("fixed", "expected"), [(0.0005, 128), (0.006, 256)])
def test_a_few_per_cent_decide(fixed: float, expected: int) -> None:
    """Every step walks through the weights once, which what it computes hides in part."""
    assert Device(lambda size: fixed + 36e-5 * size).measure()[0] == expected


def test_the_search_for_saturation_ends_where_nothing_is_gained() -> None:
    device = Device(lambda size: 25e-5 * size)
    assert device.measure()[0] == LEAST_TOKENS
    assert max(device.sizes) == 256


def test_what_comes_with_every_step_counts_too() -> None:
    """A model whose steps are as short as what is around them gets long ones."""
    assert Device(lambda size: 1e-5 * size).measure()[0] == 512


@pytest.mark.parametrize(("per_token", "tries"), [(0.02, 1), (0.01, 2)])
def test_a_slow_model_holds_up_the_start_by_a_step_or_two(per_token: float, tries: int) -> None:
    device = Device(lambda size: per_token * size)
    assert device.measure() == (128, pytest.approx(128 * per_token))
    assert device.sizes == [32] * tries


@pytest.mark.parametrize(
    ("slow", "whole", "expected"), [(256, 0.205, 256), (128, 0.205, 256), (128, 0.228, 128), (32, 0.205, 256)]
)
def test_one_slow_try_hides_neither_what_a_size_gains_nor_what_it_does_not(
    slow: int, whole: float, expected: int
) -> None:
    """256 tokens gain 12 % here, or 1 %; 512 nothing. The first try takes longer than it should."""
    seconds = {32: 0.03, 128: 0.115, 256: whole, 512: 2 * whole}
    hiccups = iter([0.25 if slow == 32 else seconds[slow] / 2])
    device = Device(lambda size: seconds[size] + (next(hiccups, 0.0) if size == slow else 0.0))
    assert device.measure() == (expected, pytest.approx(seconds[expected]))


def test_a_hiccup_in_a_short_step_does_not_count() -> None:
    hiccups = iter([0.003])
    device = Device(lambda size: 1e-4 * size + (next(hiccups, 0.0) if size == 256 else 0.0))
    assert device.measure()[0] == 256


def test_a_small_cache_bounds_it() -> None:
    device = Device(lambda size: 1e-5 * max(size, 512))
    assert device.measure(most=100)[0] == LEAST_TOKENS
    assert device.sizes == [32] * 2
    assert Device(lambda size: 1e-5).measure(most=SIZES[0] - 1) == (LEAST_TOKENS, 0.0)
