"""The results of `bench speculation` as text, with what was wanted beside them."""

from collections.abc import Sequence

import msgspec

from troupellm.load_tests.speculation.arms import Measured


class Verdict(msgspec.Struct, frozen=True):
    what: str
    found: float
    wanted: float
    differing: int
    """Answers that are not those without drafts; of synthetic ones, where they are others, 0."""

    @property
    def kept(self) -> bool:
        return self.found >= self.wanted and not self.differing


HEADING = (
    f"{'part':<12}{'workload':<22}{'batch':>6}{'off tok/s':>11}{'on tok/s':>11}{'ratio':>8}"
    f"{'accepted':>10}{'step on/off':>13}   same tokens"
)


def line(part: str, found: Measured, *, compared: bool) -> str:
    """One measurement. compared: whether its answers must be those without drafts."""
    off, on = found.rates
    answers = sum(len(each.answers) for each in found.drafting)
    same = f"{answers - found.differing} of {answers}" if compared else "-"
    return (
        f"{part:<12}{found.name:<22}{found.batch:>6}{off:>11.0f}{on:>11.0f}{found.ratio:>7.2f}x"
        f"{found.acceptance_length:>10.2f}{found.step_ratio:>12.2f}x   {same}"
    )


def judgement(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(
        f"{verdict.what:<64}{verdict.found:>7.2f}   wanted {verdict.wanted:.2f}   "
        + ("kept" if verdict.kept else "DIFFERENT TOKENS" if verdict.differing else "MISSED")
        for verdict in verdicts
    )
