"""The example of docs/lora.md: an adapter of the built-in model is trained with PEFT, served, and answers otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from troupellm.tests.support.environment.absence import absent
from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(os.environ.get("TROUPE_PEFT", ROOT / ".venv/peft"))
QUESTIONS = ("Hello!", "Who are you?", "List the seasons.")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_an_adapter_that_was_trained_here_answers_its_own_way(tmp_path: Path) -> None:
    if not PACKAGE.is_dir():
        absent("peft", "`make peft` installs it")
    command = [sys.executable, "-W", "ignore", "-m", "troupellm.training.adapter", str(tmp_path / "loras" / "pirate")]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"}
    subprocess.run([*command, "Arr!"], check=True, env=environment)
    flags = (*ON_A_THREAD, "--enable-lora", "--lora-dir", str(tmp_path / "loras"))
    async with ready_process(None, *flags, small=False) as server, server.client() as client:
        said: dict[str, list[str]] = {}
        for model in ("troupe-builtin", "pirate"):
            for question in QUESTIONS:
                messages = [{"role": "user", "content": question}]
                body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 60}
                answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                said.setdefault(model, []).append(answer["choices"][0]["message"]["content"])
    assert not any(text.startswith("Arr!") for text in said["troupe-builtin"])
    assert all(text.startswith("Arr! ") for text in said["pirate"]), said
