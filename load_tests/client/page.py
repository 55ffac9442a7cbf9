"""One self-contained HTML page of a run: numbers, latency distributions, timeline, goodput. Plots are inline SVG."""

import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from troupellm.load_tests.client.metrics import METRICS, meets, values_of
from troupellm.load_tests.client.records import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TIMELINE_ROWS = 400
_BLUE, _ORANGE, _GREY, _GREEN, _RED = "#3066be", "#e8871e", "#b8bcc4", "#2e8b57", "#c0392b"
_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222;
       background: #fff; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } td { padding: .15em 1.5em .15em 0; }
td + td { font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } p.note { color: #666; }
"""
_DEFINITIONS = (
    "TTFT: from sending a request to the first chunk with content. E2EL: to the last chunk. TPOT: (E2EL - TTFT) / "
    "(output tokens - 1), so without the first token. ITL: between successive chunks. Requests leave by a schedule "
    "drawn before the run; they never wait for replies. Token counts are the server's own."
)


def render(
    report: Mapping[str, Any], records: Sequence[RequestRecord], start: float, goodput: Mapping[str, float]
) -> str:
    """Raises ModuleNotFoundError when matplotlib is not installed."""
    plots = [
        ("Latency distributions", latency_cdfs(records)),
        ("Requests over time", timeline(records, start)),
        ("Load over time", load(records, start)),
    ]
    if goodput:
        plots.append(("Goodput", goodput_bars(records, goodput)))
    sections = "".join(f"<h2>{html.escape(title)}</h2>\n{svg(figure)}\n" for title, figure in plots)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shown(value))}</td></tr>\n"
        for name, value in report.items()
        if not isinstance(value, dict | list)
    )
    client = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shown(value))}</td></tr>\n"
        for name, value in report["client"].items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>bench serve</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>bench serve: {html.escape(str(report['model_id']))}</h1>\n"
        f'<p class="note">{html.escape(_DEFINITIONS)}</p>\n{sections}'
        f"<h2>Numbers</h2>\n<table>{rows}</table>\n<h2>Load generator</h2>\n<table>{client}</table>\n</body></html>\n"
    )


def latency_cdfs(records: Sequence[RequestRecord]) -> "Figure":
    from matplotlib.figure import Figure

    good = [record for record in records if record.ok]
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    for axes, metric in zip(figure.subplots(2, 2).flat, METRICS, strict=True):
        values = sorted(1000.0 * value for value in values_of(metric, good))
        if values:
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step([values[0], *values], [0.0, *shares], where="post", color=_BLUE)
            for share, style in ((0.5, ":"), (0.99, "--")):
                axes.axhline(share, color=_GREY, linestyle=style, linewidth=0.8)
        axes.set(xlabel=f"{_TITLES[metric]} (ms)", ylabel="share", ylim=(0, 1.02))
        axes.set_xlim(left=0)
    return figure


def timeline(records: Sequence[RequestRecord], start: float) -> "Figure":
    """One row per request in order of arrival: waiting for a slot, waiting for the first token, answering."""
    from matplotlib.figure import Figure

    shown = [record for record in records if record.sent][:MAX_TIMELINE_ROWS]
    figure = Figure(figsize=(10, min(9.0, 1.5 + 0.06 * len(shown))), layout="constrained")
    axes = figure.subplots()
    for row, record in enumerate(shown):
        first = record.chunk_times[0] if record.chunk_times else record.ended
        _bar(axes, row, record.scheduled - start, record.sent - start, _GREY)
        _bar(axes, row, record.sent - start, first - start, _ORANGE)
        _bar(axes, row, first - start, record.ended - start, _BLUE if record.ok else _RED)
    for name, color in (("queued", _GREY), ("to first token", _ORANGE), ("answer", _BLUE), ("failed", _RED)):
        axes.plot([], [], color=color, linewidth=4, label=name)
    axes.legend(loc="upper right", fontsize="small")
    axes.set(xlabel="seconds", ylabel="request")
    axes.invert_yaxis()
    return figure


def _bar(axes: "Axes", row: int, left: float, right: float, color: str) -> None:
    axes.barh(row, max(0.0, right - left), left=left, height=0.8, color=color)


def load(records: Sequence[RequestRecord], start: float) -> "Figure":
    """Output tokens per second and requests in flight, per tenth of the run."""
    from matplotlib.figure import Figure

    sent = [record for record in records if record.sent]
    end = max((record.ended - start for record in sent), default=1.0) or 1.0
    width = end / min(100, max(10, int(end * 10)))
    count = round(end / width)
    tokens, flying = [0.0] * count, [0] * count
    for record in sent:
        share = record.output_tokens / len(record.chunk_times) if record.chunk_times else 0.0
        for time in record.chunk_times:
            tokens[min(count - 1, int((time - start) / width))] += share / width
        first, last = int((record.sent - start) / width), int((record.ended - start) / width)
        for index in range(first, min(count - 1, last) + 1):
            flying[index] += 1
    times = [(index + 0.5) * width for index in range(count)]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.step(times, tokens, where="mid", color=_BLUE)
    upper.set(ylabel="output tokens/s")
    upper.set_ylim(bottom=0)
    lower.step(times, flying, where="mid", color=_ORANGE)
    lower.set(ylabel="in flight", xlabel="seconds")
    lower.set_ylim(bottom=0)
    return figure


def goodput_bars(records: Sequence[RequestRecord], goodput: Mapping[str, float]) -> "Figure":
    """Share of all requests that kept each limit, and all of them."""
    from matplotlib.figure import Figure

    limits = {f"{_TITLES[name]} ≤ {value:g} ms": {name: value} for name, value in goodput.items()}
    limits["all"] = dict(goodput)
    shares = {
        name: sum(record.ok and meets(record, wanted) for record in records) / max(1, len(records))
        for name, wanted in limits.items()
    }
    figure = Figure(figsize=(10, 0.8 + 0.45 * len(shares)), layout="constrained")
    axes = figure.subplots()
    names = list(shares)
    axes.barh(names, [1.0] * len(names), color="#eee")
    axes.barh(names, [shares[name] for name in names], color=_GREEN)
    for row, name in enumerate(names):
        axes.text(0.01, row, f"{shares[name]:.1%}", va="center")
    axes.set(xlim=(0, 1))
    axes.invert_yaxis()
    return figure


def svg(figure: "Figure") -> str:
    """The figure as an SVG element, the same text for the same data."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "troupe", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
