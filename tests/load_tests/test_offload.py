"""`bench offload` measures what it says: prefixes really come from the tier, and answers are compared."""

import argparse
import json
from pathlib import Path

import msgspec
import pytest

from troupellm.load_tests.bench import offload as command
from troupellm.load_tests.flags.kv_cache import offload as add_flags
from troupellm.load_tests.kv_cache.crowd import crowd
from troupellm.load_tests.kv_cache.restore import BLOCK, restore
from troupellm.load_tests.random_model import SHAPES, write_random_model

pytestmark = pytest.mark.anyio
PREFIX = 2048


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("on_disk", [False, True])
async def test_prefixes_come_from_the_tier(tmp_path: Path, on_disk: bool) -> None:
    shape = msgspec.structs.replace(SHAPES["tiny"], max_position_embeddings=2 * PREFIX)
    folder = write_random_model(tmp_path / "model", shape)
    settings = {"device": "cpu", "num_threads": 1, "batch_invariant": True, "preemption_mode": "offload"}
    token_bytes = 8 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_size
    found = await restore(
        folder,
        settings,
        PREFIX,
        2,
        tmp_path / "blocks" if on_disk else None,
        vocab_size=shape.vocab_size,
        token_bytes=token_bytes,
    )
    assert found.different == 0
    assert len(found.computed) == len(found.restored) == len(found.held) == 2
    assert min(found.tokens_restored) >= PREFIX - 2 * BLOCK


async def test_a_crowd_is_answered_as_if_alone() -> None:
    assert await crowd(24) == {"recompute": 0, "offload": 0}


def test_a_report_with_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = "--preset tiny --parts throughput --requests 4 --prompt-len 40 --output-len 4 --repeats 1 --threads 1"
    report = tmp_path / "report.json"
    code = command.run(parser.parse_args([*flags.split(), "--prefix-len", "128", "--result-json", str(report)]))
    (verdict,) = json.loads(report.read_text())["verdicts"]
    assert code == (0 if verdict["good"] else 1)
    assert verdict["wanted"] == ">= 0.99"
    assert ("ok" if verdict["good"] else "MISSED") in capsys.readouterr().out
