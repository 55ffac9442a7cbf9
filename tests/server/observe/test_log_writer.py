"""The log's way out: no task waits for a stuck sink, and lost lines are counted and reported."""

import logging
import os
import threading

import pytest

from troupellm.server.observe.log_writer import LogWriter, QueuedHandler

PIPE_BYTES = 65_536
SECONDS = 10.0


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def read_all(end: int, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        seen += os.read(end, PIPE_BYTES)
    return seen


def test_lines_come_out_in_order(pipe):
    writer = LogWriter(pipe[1], str)
    for number in range(1000):
        writer.put(f"line {number}")
    assert read_all(pipe[0], b"line 999\n").splitlines() == [f"line {number}".encode() for number in range(1000)]
    assert writer.flush(SECONDS)
    writer.stop()
    assert writer.dropped == 0


def test_a_sink_that_takes_nothing_costs_lines_and_no_time(pipe):
    writer = LogWriter(pipe[1], lambda lines: f"{lines} lost", capacity=10)
    line = "x" * 1000
    while writer.flush(0.05):  # until the pipe is full and the thread waits
        writer.put(line)
    for _ in range(20):
        writer.put(line)
    assert writer.dropped >= 10
    reader = threading.Thread(target=read_all, args=(pipe[0], b" lost\n"))
    reader.start()
    writer.put("more")
    reader.join(SECONDS)
    assert not reader.is_alive()
    assert writer.flush(SECONDS)
    writer.stop()


def test_a_sink_that_fails_costs_the_lines_it_was_given(pipe):
    os.close(pipe[1])
    descriptor = os.open("/dev/full", os.O_WRONLY)
    writer = LogWriter(descriptor, str)
    writer.put("one")
    assert writer.flush(SECONDS)
    writer.stop()
    os.close(descriptor)
    assert writer.dropped == 1


def test_a_line_that_cannot_be_formatted_is_told(pipe):
    writer = LogWriter(pipe[1], str)
    logger = logging.Logger("odd")
    logger.addHandler(QueuedHandler(writer))
    logger.warning("%d", "text")
    assert b"could not be formatted: TypeError" in read_all(pipe[0], b"\n")
    writer.stop()
