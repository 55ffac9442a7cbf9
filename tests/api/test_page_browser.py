"""The page in headless Chromium: a first answer, hostile outputs, accessibility, narrow and dark screens."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest

from troupellm.tests.support.clients.hostile_outputs import HOSTILE
from troupellm.tests.support.environment.absence import absent
from troupellm.tests.support.servers.processes import ready_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
MODULES = Path(os.environ.get("TROUPE_CLIENTS", ROOT / ".venv-clients")) / "node"
SCRIPT = Path(__file__).parent / "clients" / "page_client.mjs"
PICTURES = os.environ.get("TROUPE_PICTURES")
"""A folder that keeps the pictures of the page, to be looked at."""
KEY = "a-key-of-the-page"


def browser() -> str:
    """Chromium of the machine, with the packages that drive it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        absent("Chromium", "the package chromium of Debian has it")
    if not (MODULES / "node_modules" / "playwright-core").exists():
        absent("playwright-core", "`make clients` installs it where there is a network")
    return found


async def drive(folder: Path, url: str, *more: str) -> dict[str, Any]:
    """The findings of the script."""
    (folder / "outputs.json").write_text(json.dumps(HOSTILE))
    pictures = Path(PICTURES) if PICTURES else folder
    command = ["node", str(SCRIPT), str(MODULES), browser(), url, str(pictures), str(folder / "outputs.json"), *more]
    done = await anyio.run_process(command, check=False, cwd=folder)
    assert done.returncode == 0, (done.stdout[-2_000:] + done.stderr[-4_000:]).decode()
    seen: dict[str, Any] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return seen


@pytest.mark.parametrize("key", ["", KEY])
async def test_the_page_in_a_browser(tmp_path: Path, key: str) -> None:
    browser()
    flags = ("--api-key", key) if key else ()
    async with ready_process(None, *flags, small=False) as server:
        seen = await drive(tmp_path, server.url, key)
    assert len(HOSTILE) >= 50
    assert seen["outputs"] == len(HOSTILE)
    assert "68" in seen["first"] == seen["reopened"]
    assert "tokens" in seen["note"]
    assert seen["seconds"] < 10
    assert (seen["fresh"], seen["searching"], seen["kept"]) == (0, "search", 1)
    assert (seen["failed"], seen["refusal"]) == (["A part", "it has failed"], "it is full")
    assert seen["again"] == ["At last", [{"role": "user", "content": "Second"}]]
    assert {"scheduler", "worker", "output"} <= set(seen["actors"])
    assert "Tokens per second" in seen["numbers"]
    assert seen["violations"] == []
    assert (seen["hits"], seen["problems"], seen["foreign"], seen["refused"], seen["dialogs"]) == ([], [], [], [], 0)
    assert seen["slow"] == []
    assert set(seen["widths"].values()) == {0}
