"""The state of the files that a model's weights were read from, to tell whether another read gives the same weights.

Neither inode nor change of status counts: some network file systems make up another inode every time, and a further
link to a file changes its status.
"""

from hashlib import sha256
from pathlib import Path

from troupellm.models.checkpoint.safetensors import model_files
from troupellm.models.hub.gguf_header import is_gguf, read_header
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ModelLoadError, WeightsChanged
from troupellm.protocol.messages.weight_file import WeightFile

END_BYTES = 64 * 2**10
"""Of each end of a file, which are digested: the header of safetensors or GGUF, and the last tensor."""
RESTART = "put the files back, or restart the engine to serve the new ones"


def weight_state(folder: Path, config: ModelConfig) -> tuple[WeightFile, ...]:
    """The state of config.json, quantization files, index and weights, or of a GGUF file with all parts, by name.

    Empty for random weights.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    if config.load_format == "dummy":
        return ()
    if is_gguf(folder):
        files = {folder, *(tensor.file for tensor in read_header(folder).tensors.values())}
    else:
        files = {file for file in model_files(folder) if file.is_file()}
    try:
        return tuple(_state(file, file.name) for file in sorted(files))
    except OSError as error:
        raise ModelLoadError(f"the weights cannot be read: {error.strerror}") from error


def require_same(first: tuple[WeightFile, ...], now: tuple[WeightFile, ...]) -> None:
    """
    Raises:
        WeightsChanged: names the first file that is not in its first state.
    """
    if first == now:
        return
    before, after = ({file.name: file for file in files} for files in (first, now))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            change = "is new" if name not in before else "has gone" if name not in after else "has changed"
            raise WeightsChanged(f"{name} {change} since the weights that are served were read", hint=RESTART)


def _state(file: Path, name: str) -> WeightFile:
    with file.open("rb", buffering=0) as opened:
        digest = sha256(opened.read(END_BYTES))
        size = opened.seek(0, 2)
        opened.seek(max(0, size - END_BYTES))
        digest.update(opened.read(END_BYTES))
    modified = file.stat().st_mtime_ns if size > 2 * END_BYTES else 0
    return WeightFile(name, size, modified, digest.hexdigest())
