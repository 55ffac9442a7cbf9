import io
import logging

import pytest

from troupellm.protocol.config.sizes import human_size
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.server.observe.load_log import LoadLog

GB = 10**9


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="troupellm.server")
    return lambda: [record.getMessage() for record in caplog.records]


def downloaded(log: LoadLog, clock: Clock, seconds: float, done: int, total: int = 5 * GB) -> None:
    clock.seconds = seconds
    log.report(LoadProgress(phase="download", done=done, total=total, detail="model.safetensors"))


def test_without_a_terminal_a_download_is_a_line_per_ten_seconds(clock, lines):
    log = LoadLog(now=clock)
    for seconds in range(26):
        downloaded(log, clock, seconds, GB + seconds * 10**8)
    assert lines() == [
        "download: 2.0 GB of 5.0 GB, 100 MB/s, 30 s left (model.safetensors)",
        "download: 3.0 GB of 5.0 GB, 100 MB/s, 20 s left (model.safetensors)",
    ]
    log.report(LoadProgress(phase="resolve", detail="a note\nand another"))
    assert lines()[2:] == ["downloaded 2.5 GB in 25 s", "a note", "and another"]


def test_a_download_that_stands_still_has_no_time_left(clock, lines):
    log = LoadLog(now=clock)
    downloaded(log, clock, 0, 0)
    downloaded(log, clock, 3000, 0)
    downloaded(log, clock, 7000, 10**6)
    assert lines() == [
        "download: 0 B of 5.0 GB, 0 B/s, time left unknown (model.safetensors)",
        "download: 1.0 MB of 5.0 GB, 142 B/s, 9720 h 16 min left (model.safetensors)",
    ]


def test_on_a_terminal_a_download_is_a_bar_with_bytes_rate_and_time_left(clock, lines):
    screen = io.StringIO()
    log = LoadLog(screen, now=clock)
    for step in range(5):
        downloaded(log, clock, step * 20, step * GB)
    log.close()
    shown = screen.getvalue().split("\r")
    assert "model.safetensors:" in shown[-1]
    assert "4.00G/5.00G" in shown[-1]
    assert "B/s]" in shown[-1]
    assert shown[-1].endswith("\n")
    assert lines() == ["downloaded 4.0 GB in 1 min 20 s"]


def test_nothing_is_said_of_a_download_that_was_complete_before(clock, lines):
    log = LoadLog(now=clock)
    log.report(LoadProgress(phase="resolve", detail=""))
    log.close()
    assert lines() == []


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (4_661_212_096, "4.7 GB"), (312_500_000, "312 MB"),
     (999_600, "1.0 MB"), (10**17, "100000 TB")],
)  # fmt: skip
def test_sizes_are_shown_in_decimal_units(size, text):
    assert human_size(size) == text
