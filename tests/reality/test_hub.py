"""The shipped command, in a fresh process, with a loopback hub in a process of its own: only the environment is set."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import anyio
import pytest

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.hub.hub_processes import LoopbackHub, loopback_hub, until_written
from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process, serving_process

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
"""Some start five servers, which takes long on a busy machine."""

PROMPTS = ("Once upon a time", "The answer is", "Grüße, 你好")
UNREAD = dict.fromkeys(("pytorch_model.bin", "modeling_tiny.py", "README.md", "onnx/model.onnx"), b"never fetched")
GGUFS = "acme/tiny-GGUF"
EXIT_MODEL = 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def hub_process(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[LoopbackHub]:
    with loopback_hub(tmp_path_factory.mktemp("hub")) as hub:
        hub.add("acme/tiny", folder)
        hub.add("acme/tiny", UNREAD)
        other = write_tiny_model(tmp_path_factory.mktemp("model") / "other", seed=7)
        hub.add("acme/tiny", other, "v1")
        yield hub


@pytest.fixture
def hub(hub_process: LoopbackHub) -> LoopbackHub:
    hub_process.behave()
    return hub_process


@pytest.fixture
def environment(hub: LoopbackHub, tmp_path: Path) -> dict[str, str]:
    """Of a machine with an empty cache and this hub."""
    cache = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_CACHE": str(tmp_path / "home" / "hub")}
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "", "HF_TOKEN": "", "NO_PROXY": "*"} | cache


async def answers(model: object, environment: Mapping[str, str], *flags: str) -> list[str]:
    """Greedy texts of a server."""
    async with ready_process(model, *flags, environment=environment) as server, server.client() as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        found = []
        for prompt in PROMPTS:
            body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0, "logprobs": 1}
            choice = (await client.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]
            found.append(json.dumps([choice["text"], choice["logprobs"]["token_logprobs"]]))
        server.signal(15)
        assert await server.exit_code(30) == 0
        return found


async def test_a_hub_id_is_served_with_an_empty_cache_as_its_folder_is(hub, environment, folder):
    from_hub = await answers("acme/tiny", environment)
    assert from_hub == await answers(folder, environment, *ON_A_THREAD)
    assert hub.names() == sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
async def test_a_revision_is_served_and_then_again_offline(hub, environment):
    main = await answers("acme/tiny", environment, *ON_A_THREAD)
    revised = await answers("acme/tiny@v1", environment, *ON_A_THREAD)
    assert revised != main
    hub.behave()
    assert await answers("acme/tiny", environment, "--revision", "v1", *ON_A_THREAD) == revised
    assert hub.names() == []
    hub.behave(status=503)
    assert await answers("hf://acme/tiny@v1", environment, *ON_A_THREAD) == revised
    hub.behave()
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    assert await answers("acme/tiny", offline, "--api-server-count", "2") == main
    assert hub.seen() == []


@pytest.mark.slow
async def test_a_gguf_file_is_served_by_its_tag(hub, environment, tmp_path):
    import transformers

    from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written

    written = Written(tmp_path / "tiny-Q4_K_M.gguf", transformers.LlamaConfig(**SIZES), {"": Kind.Q4_K}).path
    hub.add(GGUFS, {"tiny-Q4_K_M.gguf": written.read_bytes(), "tiny-UD-Q4_K_M.gguf": b"x", "tiny-Q8_0.gguf": b"x"})
    hub.add(GGUFS, {"mmproj-F16.gguf": b"x", "config.json": b"{}"})
    one_thread = (*ON_A_THREAD, "--num-threads", "1")  # log-probabilities equal to the last bit
    from_file = await answers(written, environment, *one_thread)
    for name in (f"{GGUFS}:Q4_K_M", GGUFS, f"hf://{GGUFS}/tiny-Q4_K_M.gguf"):
        assert await answers(name, environment, *one_thread) == from_file
    assert hub.names() == ["tiny-Q4_K_M.gguf"]


@pytest.mark.slow
async def test_a_server_that_is_killed_in_its_download_resumes_and_answers(hub, environment, folder):
    size = (folder / "model.safetensors").stat().st_size
    hub.behave(stalls={"model.safetensors": size // 2})
    async with serving_process("acme/tiny", *ON_A_THREAD, environment=environment) as server:
        await server.listening()
        await anyio.to_thread.run_sync(hub.until_stalled)
        blobs = Path(environment["HF_HUB_CACHE"]) / "models--acme--tiny" / "blobs"
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        part = await anyio.to_thread.run_sync(until_written, blobs, digest)
        server.signal(9)
        await server.exit_code(30)
    left = part.stat().st_size
    assert await answers("acme/tiny", environment, *ON_A_THREAD) == await answers(folder, environment, *ON_A_THREAD)
    ranges = [asked for name, asked in hub.downloads() if name == "model.safetensors"]
    assert ranges == [f"bytes=0-{size - 1}", f"bytes={left}-{size - 1}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "faults", "said"),
    [
        ("acme/none", {}, "acme/none is neither a local folder nor a model on the hub"),
        ("acme/tiny", {"gated": ["acme/tiny"]}, "acme/tiny is gated"),
        ("acme/tiny@v9", {}, "acme/tiny has no revision v9"),
        ("acme/tiny:Q2_K", {}, "acme/tiny has no GGUF file with Q2_K in its name"),
        ("acme/tiny", {"status": 429, "retry_after": "60"}, "the hub answers 429 (try again after 60 s)"),
        ("acme/tiny", {"status": 500}, "the hub answers 500"),
        ("acme/tiny", {"changed": {"model.safetensors": 9}}, "model.safetensors was damaged in the download, twice"),
        ("acme/tiny", {"sizes": {"model.safetensors": 10**17}}, "acme/tiny needs 100000 TB"),
    ],
)
async def test_a_refusal_is_exit_code_three_in_ten_seconds(hub, environment, model, faults, said):
    hub.behave(**faults)
    began = time.monotonic()
    async with serving_process(model, environment=environment) as server:
        assert await server.exit_code(30) == EXIT_MODEL
        print(f"exit after {time.monotonic() - began:.1f} s")
        with anyio.fail_after(5):
            while not server.logged("troupellm: "):  # noqa: ASYNC110 - another process's log
                await anyio.sleep(0.01)
    (line,) = server.logged("troupellm: ")
    assert said in line
