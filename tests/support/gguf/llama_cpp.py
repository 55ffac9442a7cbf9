"""llama.cpp from npm's node-llama-cpp, which `make references` installs: its token ids, and its own quantizer.

The quantizer is called through the C interface of `libllama` (llama.h: `llama_model_quantize`).
"""

import ctypes
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from troupellm.tests.support.environment.absence import absent

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venv-clients" / "llama-cpp" / "node_modules"
SCRIPT = Path(__file__).with_name("llama_cpp_tokens.mjs")
FILE_TYPES = {
    "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12,
    "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
}  # fmt: skip
"""llama.h: `enum llama_ftype`."""
_PROCESSORS = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class _Importance(ctypes.Structure):
    """llama.h: `llama_model_imatrix_data`."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _Override(ctypes.Structure):
    """llama.h: `llama_model_tensor_override`."""

    _fields_ = [("pattern", ctypes.c_char_p), ("type", ctypes.c_int)]


class _Parameters(ctypes.Structure):
    """llama.h: `llama_model_quantize_params`; the end leaves room for fields of later versions."""

    _fields_ = [
        ("nthread", ctypes.c_int), ("ftype", ctypes.c_int), ("output_type", ctypes.c_int),
        ("embedding_type", ctypes.c_int), ("allow_requantize", ctypes.c_bool), ("quantize_output", ctypes.c_bool),
        ("only_copy", ctypes.c_bool), ("pure", ctypes.c_bool), ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool), ("imatrix", ctypes.POINTER(_Importance)), ("kv_overrides", ctypes.c_void_p),
        ("tensor_overrides", ctypes.POINTER(_Override)), ("later", ctypes.c_byte * 256),
    ]  # fmt: skip


def token_ids(jobs: Sequence[tuple[Path, Sequence[str]]]) -> list[list[list[int]]]:
    """Ids of the texts of each job by the vocabulary in its file, special tokens in a text included and none added."""
    _installed()
    asked = {"modules": str(FOLDER), "jobs": [[str(path), list(texts)] for path, texts in jobs]}
    done = subprocess.run(
        ["node", SCRIPT],
        input=json.dumps(asked),
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


def requantize(source: Path, target: Path, file_type: str, tensors: Mapping[str, str] | None = None) -> None:
    """Write `source` in another file type, as llama.cpp mixes it.

    tensors: a tensor type for each pattern of tensor names. Every column counts the same in types that need an
    importance matrix.
    """
    library = _library()
    parameters = library.llama_model_quantize_default_params()
    parameters.nthread, parameters.ftype, parameters.allow_requantize = 2, FILE_TYPES[file_type], True
    rows = [(pattern.encode(), int(gguf.GGMLQuantizationType[kind])) for pattern, kind in (tensors or {}).items()]
    overrides = (_Override * (len(rows) + 1))(*(_Override(*row) for row in rows), _Override(None, 0))
    parameters.tensor_overrides = overrides
    read = gguf.GGUFReader(source)
    widths = {tensor.name: int(tensor.shape[0]) for tensor in read.tensors if len(tensor.shape) == 2}
    ones = np.ones(max(widths.values()), np.float32)
    equal = [_Importance(name.encode(), ones.ctypes.data, width) for name, width in widths.items()]
    parameters.imatrix = (_Importance * (len(equal) + 1))(*equal, _Importance(None, None, 0))
    code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    assert code == 0, f"llama.cpp could not write {source.name} as {file_type} with {tensors}"


def _library() -> ctypes.CDLL:
    _installed()
    kind = f"linux-{_PROCESSORS[platform.machine()]}"
    folder = FOLDER / "@node-llama-cpp" / kind / "bins" / kind
    if not folder.is_dir():
        absent("llama.cpp's quantizer", f"node-llama-cpp has none in {kind}")
    ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    (path,) = folder.glob("libllama.v*.so")
    library = ctypes.CDLL(str(path))
    library.llama_model_quantize_default_params.restype = _Parameters
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    library.llama_log_set(silent, None)
    library.kept = silent  # type: ignore[attr-defined]  # llama.cpp calls it as long as it is loaded
    return library


def _installed() -> None:
    if not (FOLDER / "node-llama-cpp").is_dir():
        absent("node-llama-cpp", "`make references` installs it")
