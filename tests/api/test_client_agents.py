"""Coding agents that users have, unchanged and pinned: a session of thirty turns with thoughts, calls, a picture,
broken calls, and a context that overflows once. A tiny random model says a script. `make test-clients` runs them.
"""

import itertools
import os
from pathlib import Path

import anyio
import pytest

from troupellm import Engine
from troupellm.server.app.app import asgi
from troupellm.tests.support.clients.client_agents import AGENTS, MODEL
from troupellm.tests.support.clients.client_scripts import NUM_STEPS, WRITTEN, question, write_files
from troupellm.tests.support.clients.recorded_answers import check_stream, uncached
from troupellm.tests.support.clients.recorded_requests import Recorder, Scrubber, conversation, write_requests
from troupellm.tests.support.environment.absence import absent
from troupellm.tests.support.servers.serving import served_by, server_config
from troupellm.tests.support.workers.scripted_model import scripted_settings, write_scripted_model

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("TROUPE_CLIENTS", ROOT / ".venv-clients"))
RECORD = bool(os.environ.get("TROUPE_RECORD"))
RECORDED = Path(__file__).parent / "clients" / "recorded"
SECONDS = 240.0


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    return write_scripted_model(tmp_path_factory.mktemp("scripted"))


@pytest.mark.parametrize("name", AGENTS)
async def test_a_session_with_an_overflow_ends_well(scripted, tmp_path, name):
    agent = AGENTS[name]
    binaries = agent.binaries(ENVIRONMENT / name)
    if not (binaries / agent.binary).exists():
        absent(f"{name} of {ENVIRONMENT.name}", "`make test-clients` installs it where there is a network")
    folder, home = write_files(tmp_path / "work"), tmp_path / "home"
    settings = scripted_settings(scripted) | {"served_model_name": (MODEL,), "device": "cpu"}
    async with Engine(scripted, **settings, kv_cache_memory_bytes=64 * 2**20, max_model_len=agent.context) as engine:
        config = server_config()
        app = asgi(engine, config=config)
        recorder = Recorder(app)
        async with served_by(recorder, app.host, config) as url:
            variables = agent.prepare(home, url, f"{binaries}{os.pathsep}{os.environ['PATH']}")
            command = [str(binaries / agent.binary), *agent.arguments_in(home), question(name, folder)]
            with anyio.fail_after(SECONDS):
                done = await anyio.run_process(command, check=False, cwd=folder, env=variables, input=b"")
    output = (done.stdout[-3_000:] + done.stderr[-3_000:]).decode(errors="replace")
    assert (done.returncode, output.count("All done.") > 0) == (agent.exit_code, True), output
    assert (folder / "hello.txt").read_text() == WRITTEN
    good = [entry for entry in recorder.kept if entry["status"] == 200]
    assert len(good) > NUM_STEPS
    for entry in good:
        check_stream(entry["path"], entry["answer"])
    assert {entry["status"] for entry in recorder.kept} <= {200, 400}
    lengths = [len(conversation(entry["body"])) for entry in good if entry["body"].get("tools")]
    assert any(after < before for before, after in itertools.pairwise(lengths)) == agent.overflows
    assert uncached([(entry["body"], entry["answer"]) for entry in good]) == []
    if RECORD:
        scrubber = Scrubber({str(folder): "/work", str(home): "/home/user", str(tmp_path): "/tmp"})
        write_requests(RECORDED / f"{name}.jsonl", [scrubber.request(entry) for entry in good])
