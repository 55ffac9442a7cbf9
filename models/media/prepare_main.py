"""A process that prepares images: `python -m troupellm.models.media.prepare_main FD PARENT_PID`.

Image files of strangers are decoded here, in a process with a memory limit that may be killed at any moment.
"""

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np

from troupellm.models.hub.model_folder import check_file
from troupellm.models.media.decode import BadImage, decode, pixels_digest
from troupellm.models.media.description import PROCESSOR_FILES, MediaModel, describe_media
from troupellm.models.processes.process_limits import limit
from troupellm.protocol.config.media import MediaConfig
from troupellm.protocol.messages.media import MediaTensor
from troupellm.protocol.wire.frame_socket import FrameSocket
from troupellm.protocol.wire.frames import FrameError
from troupellm.protocol.wire.lifeline import die_with
from troupellm.protocol.wire.media import (
    HELLO,
    MAX_FRAME_BYTES,
    FromMedia,
    ImagePrepared,
    ImageRefused,
    LoadProcessor,
    PrepareImage,
    ProcessorLoaded,
    ToMedia,
)

NICE = 5
"""Steps of the model have three times the share of a busy processor."""
EXIT_GONE = 0
MOST_TENSOR_BYTES = MAX_FRAME_BYTES // 2
_RAGGED = "the image cannot be prepared by the model's image processor"

Link = FrameSocket[FromMedia, ToMedia]


def main() -> int:
    """Serve the parent until it closes the socket."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    if not die_with(parent):
        return EXIT_GONE
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICE)
    link: Link = FrameSocket(socket.socket(fileno=descriptor), ToMedia, HELLO, limit=MAX_FRAME_BYTES)
    try:
        link.greet()
        return _Server(link).run()
    except FrameError:
        return EXIT_GONE


class _Server:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._model: MediaModel | None = None
        self._processor: Any = None
        self._options = b""
        self._max_pixels = 0

    def run(self) -> int:
        while True:
            match self._link.receive():
                case LoadProcessor() as message:
                    self._link.send(ProcessorLoaded(self._load(message)))
                case PrepareImage(data=data):
                    self._link.send(self._prepare(data))

    def _load(self, message: LoadProcessor) -> str | None:
        folder = Path(message.folder)
        try:
            if not message.follow_links:
                for file in (name for name in PROCESSOR_FILES if (folder / name).is_file()):
                    check_file(folder / file)
            self._model = describe_media(folder, MediaConfig())
            self._processor = load_processor(folder, message.settings)
            self._options = json.dumps(self._processor.to_dict(), sort_keys=True, default=str).encode()
        except Exception as error:  # a processor's files may hold anything
            return f"{type(error).__name__}: {error}"[:500]
        if self._model is None:
            return "the model sees no images"
        self._max_pixels = message.max_pixels
        limit_memory(message.memory_bytes)
        return None

    def _prepare(self, data: bytes) -> ImagePrepared | ImageRefused:
        assert self._model is not None
        try:
            image = decode(data, self._max_pixels)
            return prepared(self._model, self._processor, image, self._options)
        except BadImage as error:
            return ImageRefused(str(error))
        except MemoryError:
            return ImageRefused("it takes too much memory to prepare")
        except Exception:  # processors may raise anything for odd sizes
            return ImageRefused(_RAGGED)


def load_processor(folder: Path, settings: dict[str, Any]) -> Any:
    """The image processor of a checkpoint, on Pillow and numpy.

    Args:
        settings: over those of its files.
    """
    from transformers import AutoImageProcessor
    from transformers.utils import logging

    logging.set_verbosity_error()
    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", local_files_only=True, trust_remote_code=False, **settings
    )


def prepared(model: MediaModel, processor: Any, image: Any, options: bytes) -> ImagePrepared:
    """The tensors that the encoder reads of an image.

    Raises:
        BadImage: it becomes larger than a step can take.
    """
    made = processor(images=[image], return_tensors="np", **model.family.processor_options)
    arrays = {name: np.ascontiguousarray(made[name]) for name in model.family.tensors if name in made}
    masks = {name: array for name, array in arrays.items() if name.endswith("_mask")}
    for name, mask in masks.items():
        if mask.all():
            del arrays[name]
        else:
            arrays[name] = mask.astype(bool)
    if sum(array.nbytes for array in arrays.values()) > MOST_TENSOR_BYTES:
        raise BadImage(f"prepared, it has more than {MOST_TENSOR_BYTES >> 20} MiB")
    return ImagePrepared(
        digest=pixels_digest(image, options),
        num_vectors=model.family.num_vectors({name: array.shape for name, array in arrays.items()}),
        grid=model.family.grid(made),
        tensors=tuple(
            MediaTensor(name, array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()
        ),
    )


def limit_memory(more: int) -> None:
    """Never have more than now and `more` bytes on top."""
    status = Path("/proc/self/statm")
    if status.is_file():  # Linux
        pages = int(status.read_text(encoding="ascii").split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


if __name__ == "__main__":
    sys.exit(main())
