"""A wheel and an sdist install into an empty environment and serve the built-in model from there."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WHEEL_BYTES = 15 * 2**20


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True, capture_output=True)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_archives_hold_what_is_needed_and_no_more(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as wheel, tarfile.open(archives["sdist"]) as sdist:
        names, sources = wheel.namelist(), sdist.getnames()
    assert "troupellm/models/builtin/weights/model.safetensors" in names
    for drafter in ("draft_model", "eagle", "medusa"):
        assert f"troupellm/models/builtin/drafters/{drafter}/config.json" in names
        assert f"troupellm/models/builtin/drafters/{drafter}/model.safetensors" in names
        assert any(name.endswith(f"drafters/{drafter}/model.safetensors") for name in sources)
    assert "troupellm/models/builtin/drafters/draft_model/tokenizer.json" in names
    for data in ("py.typed", "kernels/cpp/attention.cpp", "kernels/cpp/float_tile.h", "server/openapi/docs.html"):
        assert f"troupellm/{data}" in names
        assert any(name.split("/", 1)[-1] == data for name in sources), data
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"troupellm"}
    assert not [name for name in names if "/tests/" in name or "/training/" in name]
    assert archives["wheel"].stat().st_size < MAX_WHEEL_BYTES
    assert any(name.endswith("weights/model.safetensors") for name in sources)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_archive_serves(kind: str, archives: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "constraints-cpu.txt"
    for requirement in ("torch", str(archives[kind])):
        command = [python, "-m", "pip", "install", "-q", "-c", constraints, requirement]
        subprocess.run(command, check=True, capture_output=True)
    server = subprocess.Popen(
        [tmp_path / "venv" / "bin" / "troupellm", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert server.stdout is not None
        address = next(found.group(1) for line in server.stdout if (found := re.search(r"at (http://\S+)", line)))
        body = json.dumps({"model": "troupe-builtin", "prompt": "Once upon a time", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{address}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
        server.stdout.close()
