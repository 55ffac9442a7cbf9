"""The processes in which chat templates are rendered: how they start, take jobs, give answers and end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from troupellm.actors.engine.start import POOL_SIZE
from troupellm.actors.input.long_texts import PARALLEL
from troupellm.models.chat_template import template_child
from troupellm.models.chat_template.template_process import (
    _DECODED_BYTES,
    _ENCODED_LETTERS,
    MOST_IDLE,
    TemplateExhausted,
    TemplateProcesses,
    TemplateRefused,
    _json,
)
from troupellm.protocol.errors import EngineStopped

USER = [{"role": "user", "content": "hi"}]
RENDERING_THREADS = POOL_SIZE + PARALLEL
"""Of a server: those of its input processor, and those that count tokens."""
LIMIT = 0.05
"""Seconds of processor time, so that the tests are quick."""
DOUBLED = "{% set n = namespace(x=[0]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"


@pytest.fixture(scope="module")
def processes() -> Iterator[TemplateProcesses]:
    made = TemplateProcesses()
    yield made
    made.close()


ENDLESS = {
    "Python code": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one call": DOUBLED + "{% set a = n.x %}" + DOUBLED + "{{ a == n.x }}",
}


def test_an_idle_process_that_was_killed_is_replaced_unseen(processes):
    assert processes.render("a", {"messages": USER}, 0.3) == "a"
    for pid in processes.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert processes.render("a", {"messages": USER}, 0.3) == "a"
    assert len(processes.pids) == 1


def test_the_threads_of_a_server_keep_a_process_each():
    made = TemplateProcesses()

    def render(_: int) -> None:
        with pytest.raises(TemplateExhausted, match="^time$"):
            made.render(ENDLESS["Python code"], {"messages": USER}, 0.3)

    with ThreadPoolExecutor(RENDERING_THREADS) as threads:
        list(threads.map(render, range(RENDERING_THREADS)))
    assert len(made.pids) == RENDERING_THREADS
    made.close()


def test_no_more_than_six_processes_wait_for_the_next_rendering():
    made = TemplateProcesses()

    def render(_: int) -> None:
        with pytest.raises(TemplateExhausted, match="^time$"):
            made.render(ENDLESS["Python code"], {"messages": USER}, 0.3)

    more = MOST_IDLE + 2
    with ThreadPoolExecutor(more) as threads:
        list(threads.map(render, range(more)))
    assert len(made.pids) == MOST_IDLE == 6
    made.close()
    assert made.pids == []


def test_the_imports_of_a_new_process_take_no_time_of_its_first_rendering(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import time\nwhile time.process_time() < 0.5:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = TemplateProcesses()
    assert made.render("a", {"messages": USER}, LIMIT) == "a"
    made.close()


def test_closed_processes_are_gone_and_render_no_more():
    made = TemplateProcesses()
    assert made.render("a", {"messages": USER}, 0.3) == "a"
    (pid,) = made.pids
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineStopped):
        made.render("a", {"messages": USER}, 0.3)


def test_a_rendering_that_runs_ends_when_its_processes_are_closed():
    made = TemplateProcesses()
    with ThreadPoolExecutor(1) as thread:
        rendering = thread.submit(made.render, ENDLESS["one call"], {"messages": USER}, 60.0)
        while not made.pids:
            time.sleep(0.001)
        made.close()
        with pytest.raises(EngineStopped, match="the engine was closed"):
            rendering.result()


PARENT = """
import os, resource, sys, threading
from troupellm.models.chat_template.template_process import TemplateProcesses
made = TemplateProcesses()
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
assert made.render("a", {"messages": []}, 0.3) == "a"
(pid,) = made.pids
limits = open(f"/proc/{pid}/limits").read()
print(pid, *next(line.split()[3:5] for line in limits.splitlines() if line.startswith("Max address space")), flush=True)
made.render(sys.argv[1], {"messages": []}, 0.3)
"""


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[str]"]:
    """A process whose template process renders without end, and hears no signal."""
    command = [sys.executable, "-c", PARENT, ENDLESS["one call"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_keeps_the_lower_limit_of_its_parent_and_ends_without_it(parent):
    pid, soft, hard = map(int, parent.stdout.readline().split())
    assert (soft, hard) == (template_child.MEMORY_BYTES, 2**33)
    while "R (running)" not in status(pid):
        time.sleep(0.001)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60.0
    while not any(word in status(pid) for word in ("gone", "Z (zombie)")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "gone"


@pytest.mark.parametrize("letter", ["é", "東", "🦊", "\ud800", "\n"])
def test_texts_longer_than_a_piece_come_back_whole(processes, letter):
    text = "a" + letter * (_DECODED_BYTES // len(letter.encode("utf-8", "surrogatepass")) + 9)
    assert processes.render("{{ messages[0].content }}!", {"messages": [{"content": text}]}, 5.0) == text + "!"


def test_texts_longer_than_one_call_encodes_arrive_whole(processes):
    """Wherever they stand, cut inside a quoted character or not."""
    long = ('"\\\n\u00e9\U0001f600' * _ENCODED_LETTERS)[: 3 * _ENCODED_LETTERS + 1]
    deep: object = "deep"
    for level in range(40):
        deep = {"level": level, "below": [deep]}
    messages = [{"content": long}, {"content": [{"type": "text", "text": long}], "calls": ({"f": {}},), "n": [1, None]}]
    messages += [{"content": deep}]
    shown = processes.render("{{ messages | tojson }}", {"messages": messages}, 20.0)
    assert json.loads(shown) == json.loads(json.dumps(messages))


def test_no_call_of_the_encoder_takes_a_whole_text():
    """It holds the interpreter's lock: 50 ms for 8 MiB."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * (4 * _ENCODED_LETTERS)}]}]
    pieces = list(_json(messages))
    assert json.loads("".join(pieces)) == messages
    assert max(map(len, pieces)) == _ENCODED_LETTERS


def test_variables_cross_to_the_process_and_texts_come_back_whole(processes):
    values = {
        "half": "\ud800",
        "big": 2**70,
        "text": 'Zürich 東京 🦊\n"',
        "list": [1.5, None, True],
        "map": {"b": 1, "a": 2},
    }
    source = "{{ half }}|{{ big }}|{{ text }}|{{ list }}|{{ list | tojson }}"
    expected = template_child.render(source, {"messages": USER, **values})
    assert processes.render(source, {"messages": USER, **values}, 0.3) == expected
    with pytest.raises(TemplateRefused, match="plain data only"):
        processes.render(source, {"messages": USER, "half": object()}, 0.3)
