"""The shipped command with folders as tools publish them: the plain folder's answers, or exit code 3 and the reason."""

import json
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from safetensors.numpy import load_file, save_file

from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.servers.processes import ON_A_THREAD, ready_process, serving_process

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

EXIT_MODEL = 3
SINGLE = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4970000000\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def configured(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))

    return change


def as_published(folder: Path) -> None:
    """Shards without an index, a byte order mark, NaN, whole floats and no architecture."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    for number in (1, 2):
        names = sorted(tensors)[number - 1 :: 2]
        save_file({name: tensors[name] for name in names}, folder / f"model-0000{number}-of-00002.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    text = json.dumps(config | {"hidden_size": float(config["hidden_size"]), "attention_dropout": float("nan")})
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())


async def answer(folder: Path) -> str:
    async with ready_process(folder, *ON_A_THREAD) as server, server.client() as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": name, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "logprobs": 1}
        choice = (await client.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]
        server.signal(15)
        assert await server.exit_code(30) == 0
        return json.dumps([choice["text"], choice["logprobs"]["token_logprobs"]])


async def test_a_folder_as_tools_publish_it_answers_as_the_plain_one(tmp_path: Path) -> None:
    plain, published = write_tiny_model(tmp_path / "plain"), write_tiny_model(tmp_path / "published")
    as_published(published)
    assert await answer(published) == await answer(plain)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:5000]),
            "is cut: it has 5,000",
        ),
        (lambda folder: (folder / SINGLE).write_bytes(POINTER), f"{SINGLE} is a Git LFS pointer"),
        (configured(architectures=["MyForCausalLM"], auto_map={"AutoModel": "m.M"}), "needs its own Python code"),
        (
            configured(quantization_config={"quant_method": "eetq", "weights": "int8"}),
            "quantization_config.quant_method must be one of",
        ),
    ],
    ids=["cut", "pointer", "own code", "eetq"],
)
async def test_a_folder_that_cannot_be_served_exits_3_with_the_reason(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    change(folder)
    async with serving_process(folder, *ON_A_THREAD) as server:
        assert await server.exit_code(100) == EXIT_MODEL
        with anyio.fail_after(20):
            while not server.logged("troupellm: "):  # noqa: ASYNC110 - another process's log
                await anyio.sleep(0.01)
    (line,) = server.logged("troupellm: ")
    assert said in line
