"""Rows F1 to F3, F6 and F8 of the fault table: checkpoints that are damaged, or made to do harm.

The tests beside the loaders read each bad file; here none of them is served.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.tests.support.checkpoints.refusals import Change, config, content, engine_of, refused
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.servers.serving import running_server

pytestmark = pytest.mark.anyio

MEBIBYTE = 2**20
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
PICKLES = ("pytorch_model.bin", "model.pt", "consolidated.pth", "last.ckpt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(begin: int, end: int, shape: tuple[int, ...] = (1,), kind: str = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


FILES = {
    "nothing": b"",
    "header beyond the file": safetensors(b"{}", length=2**40),
    "header of 200 MB": safetensors(b"{}", length=200_000_000),
    "no JSON": safetensors(b"{nothing}"),
    "overlap": safetensors({"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6)),
    "gap": safetensors({"a": tensor(0, 4), "b": tensor(8, 12)}, bytes(12)),
    "negative": safetensors({"a": tensor(0, 4, (-1,))}, bytes(4)),
    "overflow": safetensors({"a": tensor(0, 4, (2**40, 2**40))}, bytes(4)),
    "type": safetensors({"a": tensor(0, 4, kind="X9")}, bytes(4)),
    "more bytes": safetensors({"a": tensor(0, 4)}, bytes(8)),
    "other tensors": safetensors({"a": tensor(0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
async def test_F1_damaged_weights_are_refused_without_memory(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    before = psutil.Process().memory_info().rss
    assert (await refused(folder)).startswith(WEIGHTS)
    assert psutil.Process().memory_info().rss - before < 64 * MEBIBYTE


async def test_F1_a_file_that_ends_early(folder):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    assert (await refused(folder)).startswith(WEIGHTS)


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what is behind it."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_weights(folder: Path, header: str, body: bytes) -> None:
    text = header.encode()
    (folder / WEIGHTS).write_bytes(safetensors(text + b" " * (-len(text) % 8), body))


@pytest.mark.parametrize("position", ["before", "after"])
async def test_F1_a_tensor_that_is_named_twice(folder, position):
    """Each reader would take one of the two: this one the right one, another one something else, or the reverse."""
    header, body = split(folder / WEIGHTS)
    other = json.dumps({HEAD: header[HEAD] | {"shape": header[HEAD]["shape"][::-1]}})
    first, second = (other, json.dumps(header)) if position == "before" else (json.dumps(header), other)
    write_weights(folder, f"{first[:-1]}, {second[1:]}", body)
    assert await refused(folder) == f"{WEIGHTS}: the header names {HEAD} twice"


@pytest.mark.parametrize(
    "shape",
    [(0, 32), (272, 0), (0,), (0, 2**62), (1,), (-1, 32), (-272, -32), (2**20, 2**10), (2**31, 2**31), (2**62, 2**62)],
    ids=str,
)
async def test_F1_shapes_without_the_values_that_the_model_wants(folder, shape):
    header, body = split(folder / WEIGHTS)
    begin, end = header[HEAD]["data_offsets"]
    less = end - begin - 4 * prod(shape) if min(shape) >= 0 and prod(shape) < 2 else 0
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [place - less for place in entry["data_offsets"]]
    header[HEAD] |= {"shape": shape, "data_offsets": [begin, end - less]}
    write_weights(folder, json.dumps(header), body[: end - less] + body[end:])
    before = psutil.Process().memory_info().rss
    message = await refused(folder)
    assert psutil.Process().memory_info().rss - before < 64 * MEBIBYTE
    told = f": tensor {HEAD} has shape {list(shape)}, expected [" if less else " cannot be read: "
    assert message.startswith(f"{WEIGHTS}{told}")


class Harm:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [*PICKLES, WEIGHTS])
async def test_F2_pickled_weights_are_refused_and_never_read(folder, tmp_path, name):
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    message = await refused(folder)
    assert message.startswith(WEIGHTS)
    assert name in message
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("code", ["troupellm", pytest.param("transformers", marks=pytest.mark.slow)])
async def test_F2_pickles_beside_safetensors_are_not_opened(folder, tmp_path, code):
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    os.mkfifo(folder / "training_args.bin")  # a reader that opens it waits for ever
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {HEAD: "pytorch_model.bin"}}))
    async with Engine(str(folder), **SETTINGS, model_impl=code) as engine:
        assert len((await engine.generate([5], max_tokens=2, ignore_eos=True)).token_ids) == 2
    assert not (tmp_path / "harmed").exists()
    pickle.loads((folder / PICKLES[0]).read_bytes())
    assert (tmp_path / "harmed").exists()


async def test_F2_an_index_may_not_name_a_pickle(folder, tmp_path):
    (folder / PICKLES[0]).write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    index(PICKLES[0])(folder)
    assert await refused(folder) == f"{INDEX}: {PICKLES[0]!r} is not the name of a safetensors file in this folder"
    assert not (tmp_path / "harmed").exists()


NESTED = b'{"a":' * 100_000
CONFIGS = {
    "missing": lambda folder: (folder / "config.json").unlink(),
    "no JSON": content(b"{"),
    "nested": content(NESTED),
    "unknown": config(architectures=["NobodyForCausalLM"], model_type="nobody"),
    "zero": config(hidden_size=0),
    "negative": config(num_hidden_layers=-1),
    "huge": config(hidden_size=10**12),
    "layers": config(num_hidden_layers=10**9),
    "positions": config(max_position_embeddings=10**12),
    "heads": config(num_attention_heads=3),
}


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS.keys())
async def test_F3_configurations_that_cannot_be(folder, change):
    change(folder)
    message = await refused(folder)
    assert message.startswith(("config.json", WEIGHTS)), message


WITHOUT_ASSERTS = """
import json, sys
import anyio
from troupellm.actors.engine.engine import Engine
from troupellm.protocol.errors import ModelLoadError

async def refusal(folder, settings):
    try:
        async with Engine(folder, **settings):
            return "it was served"
    except ModelLoadError as error:
        return error.message

settings = json.loads(sys.argv[1])
refusals = [anyio.run(refusal, folder, settings) for folder in sys.argv[2:]]
print(json.dumps({"asserts": __debug__, "refusals": refusals}))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_F3_python_without_assert_statements_refuses_the_same(tmp_path):
    """In a process of its own, for every damage to weights and configuration that is listed here."""
    changes = [*CONFIGS.values(), *(content(data, WEIGHTS) for data in FILES.values())]
    folders = [write_tiny_model(tmp_path / f"tiny-{number}") for number in range(len(changes))]
    for folder, change in zip(folders, changes, strict=True):
        change(folder)
    refusals = [await refused(folder) for folder in folders]
    command = [sys.executable, "-O", "-c", WITHOUT_ASSERTS, json.dumps(SETTINGS), *map(str, folders)]
    child = await anyio.run_process(command, check=False, stderr=subprocess.PIPE)
    assert child.returncode == 0, child.stderr.decode(errors="replace")[-2000:]
    assert json.loads(child.stdout.splitlines()[-1]) == {"asserts": False, "refusals": refusals}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "NobodyForCausalLM"])
async def test_F3_code_beside_a_checkpoint_is_not_run(folder, tmp_path, architecture):
    (folder / "modeling_nobody.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'harmed')!r})\n")
    auto = {"AutoConfig": "modeling_nobody.C", "AutoModelForCausalLM": "modeling_nobody.M"}
    config(architectures=[architecture], auto_map=auto)(folder)
    if architecture == "LlamaForCausalLM":
        async with engine_of(folder) as engine:
            await engine.generate([5], max_tokens=1)
    else:
        assert architecture in await refused(folder)
    assert not (tmp_path / "harmed").exists()


def index(file: str) -> Change:
    return lambda folder: (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))


def pipe(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


PLACES = {
    "missing": index("nobody.safetensors"),
    "above": index("../tiny/model.safetensors"),
    "absolute": index("/etc/passwd"),
    "device": index("/dev/zero"),
    "inside": index("sub/model.safetensors"),
    "pipe": pipe,
}


@pytest.mark.parametrize("change", PLACES.values(), ids=PLACES.keys())
async def test_F6_files_elsewhere_are_not_opened(folder, change):
    change(folder)
    with anyio.fail_after(60):
        message = await refused(folder)
    assert "passwd" not in message or message.startswith(INDEX)


async def test_F8_no_adapter_is_loaded_where_none_are_served(tiny_engine):
    async with tiny_engine() as engine, running_server(engine) as served, served.client() as client:
        loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "../../x"})
        asked = await client.post("/v1/completions", json={"model": "../../x", "prompt": "Hi"})
    assert (loaded.status_code, loaded.json()["error"]["code"]) == (404, "unknown_url")
    assert (asked.status_code, asked.json()["error"]["code"]) == (404, "model_not_found")
