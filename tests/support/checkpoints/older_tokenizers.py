"""Tokenizer files older than tokenizer.json, and ids of awkward texts by other tools, from
`tests/reality/make_reference_tokenizers.py`."""

import base64
import json
from pathlib import Path
from typing import Any

from troupellm.tests.support.gguf.gguf_vocabulary import stored

STORED = Path(__file__).parents[2] / "models" / "reference_tokenizers.json"


def ranks() -> dict[bytes, int]:
    """The merged tokens of the stored byte-level vocabulary: rank by bytes."""
    vocabulary = stored()["vocabularies"]["bytes"]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    shown = {chr(byte) if byte in printable else chr(next(spare)): byte for byte in range(256)}
    merged = {merge.replace(" ", "") for merge in vocabulary["merges"]} | set(shown)
    return {
        bytes(shown[character] for character in token): index
        for index, token in enumerate(token for token in vocabulary["tokens"] if token in merged)
    }


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Write files: an object as JSON, text as the bytes that it spells in base64, and "ranks" as tiktoken's lines."""
    for name, value in files.items():
        if value == "ranks":
            data = b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks().items())
        elif isinstance(value, str):
            data = base64.b64decode(value)
        else:
            if value.get("vocab") == "ranks":
                entries = [{"rank": r, "token_bytes": base64.b64encode(t).decode()} for t, r in ranks().items()]
                value = value | {"vocab": entries}
            data = json.dumps(value).encode()
        (folder / name).write_bytes(data)
    return folder
