"""The results of `bench offline` as text."""

from collections.abc import Sequence

from troupellm.load_tests.peers.cells import LEAST_SAME, OURS, Comparison, Verdict, geometric_mean

WIDTH = 13


def heading(contestants: Sequence[str]) -> str:
    names = "".join(f"{name:>{WIDTH}}" for name in contestants)
    return f"{'config':<12}{'':<8}{'cell':<10}{names}{'best peer':>{WIDTH}}{'ratio':>8}"


def line(comparison: Comparison, contestants: Sequence[str]) -> str:
    rates = "".join(
        f"{comparison.rates[name]:>{WIDTH}.1f}" if name in comparison.rates else f"{'-':>{WIDTH}}"
        for name in contestants
    )
    best = comparison.best
    ratio = comparison.ratio(best)
    end = f"{best or '-':>{WIDTH}}" + (f"{ratio:>7.2f}x" if ratio is not None else f"{'-':>8}")
    return f"{comparison.config:<12}{comparison.precision:<8}{comparison.cell.name:<10}{rates}{end}" + _differing(
        comparison
    )


def _differing(comparison: Comparison) -> str:
    """Whose answers are not ours; at 8 bits everybody rounds in a way of his own."""
    if not comparison.differing:
        return ""
    early = comparison.precision == "fp32" and min(comparison.differing.values()) < LEAST_SAME
    shares = ", ".join(f"{name} {share:.0%}" for name, share in comparison.differing.items())
    return f"   same tokens: {shares}" + (" DIFFERS EARLY: is it the same model?" if early else "")


def means(comparisons: Sequence[Comparison], contestants: Sequence[str]) -> str:
    """Our geometric means per configuration and precision, against each peer and against the best of each cell."""
    lines = []
    for group in dict.fromkeys((one.config, one.precision) for one in comparisons):
        chosen = [one for one in comparisons if (one.config, one.precision) == group]
        parts = []
        for name in (*(name for name in contestants if name != OURS), None):
            ratios = [ratio for one in chosen if (ratio := one.ratio(name or one.best)) is not None]
            if ratios:
                parts.append(f"{name or 'best of each cell'} {geometric_mean(ratios):.2f}x")
        if parts:
            lines.append(f"{group[0]:<12}{group[1]:<8}geometric mean against " + ", ".join(parts))
    return "\n".join(lines)


def judgement(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(
        f"{verdict.what:<44}{verdict.found:>7.2f}x   wanted {verdict.wanted:.2f}x   "
        + ("kept" if verdict.kept else "MISSED" if verdict.found < verdict.wanted else "not shown")
        + f"   {verdict.cells} cells; {', '.join(verdict.peers)}"
        + (f"; numbers MISSING of {', '.join(verdict.missing)}" if verdict.missing else "")
        for verdict in verdicts
    )
