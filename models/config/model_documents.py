"""The JSON documents of a model: files of its folder, or equivalents made from a GGUF file."""

from pathlib import Path
from typing import Any

from troupellm.models.config.gguf_documents import document
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.hub.json_file import read_object
from troupellm.models.hub.model_folder import check_file


def read_json(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """A JSON object; empty when there is no such file. A GGUF file counts as the folder of what can be made from it.

    Args:
        folder: of the model, where the file is not right in it.

    Raises:
        ModelLoadError: not JSON, not an object, or a link out of the folder.
    """
    if is_gguf(path.parent):
        return document(path.parent, path.name)
    check_file(path, folder)
    if not path.is_file():
        return {}
    return read_object(path)
