"""Small vocabularies as GGUF files without weights, and the token ids that llama.cpp or another tool gives there.

Merges cross every border between words: any difference in the way that a text is cut gives other ids. The ids come from
`tests/reality/make_reference_ids.py`.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

STORED = Path(__file__).parents[2] / "quantization" / "reference_ids.json"


def stored() -> dict[str, Any]:
    """The vocabularies by name, the rules' files, and ids of `awkward_texts.TEXTS`."""
    found: dict[str, Any] = json.loads(STORED.read_text())
    return found


def write_vocabulary(path: Path, vocabulary: dict[str, Any], **settings: Any) -> Path:
    """A file that llama.cpp loads with `vocab_only`.

    Args:
        vocabulary: `tokens`, `types`, and if it has them `merges` and `scores`.
        settings: metadata by the last part of its key under `tokenizer.ggml`.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    for name, value in (vocabulary.get("settings", {}) | settings).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)]
        add(f"tokenizer.ggml.{name}", value)
    sizes = {"context_length": 64, "embedding_length": 4, "block_count": 1, "feed_forward_length": 4}
    for name, size in sizes.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
