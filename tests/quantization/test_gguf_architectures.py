"""Every architecture of GGUF files: tokens of a tiny model, written as the converter writes it, are transformers'."""

from pathlib import Path

import pytest
from gguf_converter import write
from gguf_families import FAMILIES
from gguf_llama import Kind
from quantized_llama import check_tokens, load, tokens_of

ONE_TABLE = {"disable_hybrid_kv_cache_manager": True}
"""All layers share a block table, which the plans here are written for."""
DEEP = ("gemma2 of 46 layers", "gemma3 of 62 layers")


def params() -> list[object]:
    """Packed weights in `make test`, plain ones beside them in `make test-all`."""
    return [
        pytest.param(name, kind, id=f"{name}-{kind.name}", marks=pytest.mark.slow if plain or name in DEEP else ())
        for name in FAMILIES
        for kind, plain in ((Kind.Q8_0, False), (Kind.F32, True))
    ]


@pytest.mark.parametrize(("name", "kind"), params())
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str, kind: Kind) -> None:
    family = FAMILIES[name]
    model = write(tmp_path / "tiny.gguf", family.converter, family.make(), kind, family.extra)
    worker, _ = load(tmp_path / "tiny.gguf", **ONE_TABLE)
    check_tokens(model, tokens_of(worker), 1e-3)
    worker.close()
