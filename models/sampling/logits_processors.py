"""Logits processors: plug-ins of the server that change scores before a token is drawn, for the rows that ask for it.

A plug-in is a subclass of `troupellm.LogitsProcessor`, installed under the entry point group
`troupellm.logits_processors` or named with `--logits-processors name=module:Class`. A request names it and gives it
plain data, never code; with `--default-logits-processors name` every request has it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import ProcessorInfo, SamplingState

GROUP = "troupellm.logits_processors"
_LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class ProcessedRow:
    """A row that asked for a plug-in."""

    options: Any
    """The result of `LogitsProcessor.prepare` for the request's arguments."""
    tokens: Tensor
    """Every token so far, prompt first, int32 [length]; a view that must not be written."""
    num_prompt_tokens: int


class LogitsProcessor(ABC):
    """One object serves all rows of a worker. Its change to a row must follow from that row's options and tokens alone:
    rows are preempted, computed again by another worker, and batched with other rows in every step."""

    arguments: ClassVar[tuple[str, ...]] = ()
    """Names by which `vllm_xargs` turns this plug-in on; a request may also name the plug-in itself."""

    def __init__(self, vocab_width: int, device: torch.device) -> None:
        """vocab_width: width of the logits."""
        self.vocab_width = vocab_width
        self.device = device

    def prepare(self, arguments: dict[str, Any]) -> Any:
        """Look at a request's arguments once, when its row begins; gives the row's `options`.

        Raises:
            ValueError: they are wrong; the text is shown to the client.
        """
        return arguments

    @abstractmethod
    def apply(self, logits: Tensor, rows: Sequence[ProcessedRow]) -> Tensor:
        """Change scores, after masks, biases and penalties and before the temperature.

        Args:
            logits: float32 [rows, vocab]; may be overwritten.

        Returns:
            float32 [rows, vocab]; -inf is never drawn.
        """


Processors = Mapping[str, LogitsProcessor]


def load_processors(named: Iterable[str], vocab_width: int, device: torch.device) -> dict[str, LogitsProcessor]:
    """Every installed plug-in, and those that are named as `name=module:Class` or `module:Class`.

    Raises:
        ModelLoadError: one cannot be imported, or is no plug-in.
    """
    makers: dict[str, Callable[[], Any]] = {point.name: point.load for point in entry_points(group=GROUP)}
    for text in named:
        name, _, path = text.rpartition("=")
        makers[name or path.rpartition(":")[2]] = _importer(path)
    found = {}
    for name, load in makers.items():
        try:
            kind = load()
            processor = kind(vocab_width, device)
        except Exception as error:  # a plug-in may raise anything
            reason = str(error)[:_LONGEST_REASON] or type(error).__name__
            raise ModelLoadError(f"logits processor {name} cannot be loaded: {reason}") from error
        if not isinstance(processor, LogitsProcessor):
            raise ModelLoadError(f"logits processor {name} is no subclass of {LogitsProcessor.__name__}")
        found[name] = processor
    return found


def describe(processors: Processors, defaults: Iterable[str] = ()) -> tuple[ProcessorInfo, ...]:
    """
    Args:
        defaults: those that every request has, each as `name` or `name={arguments in JSON}`.

    Raises:
        ModelLoadError: a default names no plug-in, or has arguments that its plug-in refuses.
    """
    always = dict(_default(text, processors) for text in defaults)
    return tuple(
        ProcessorInfo(name, tuple(processor.arguments), always.get(name)) for name, processor in processors.items()
    )


def _default(text: str, processors: Processors) -> tuple[str, bytes]:
    name, _, given = text.partition("=")
    if name not in processors:
        offered = ", ".join(processors) or "none"
        raise ModelLoadError(f"default_logits_processors: {name} is none of the logits processors, which are {offered}")
    try:
        arguments = msgspec.json.decode(given or "{}", type=dict[str, Any])
        processors[name].prepare(dict(arguments))
    except Exception as error:  # the plug-in's own code checks them
        reason = str(error)[:_LONGEST_REASON] or type(error).__name__
        raise ModelLoadError(f"default_logits_processors: the arguments of {name} are refused: {reason}") from error
    return name, msgspec.json.encode(arguments)


class RowProcessors:
    """The plug-ins of one row, in the server's order, with the row's options."""

    __slots__ = ("options", "refusal")

    def __init__(self, state: SamplingState, processors: Processors) -> None:
        self.options: dict[str, Any] = {}
        self.refusal: str | None = None
        """Why the row cannot be computed; safe for clients."""
        for name, arguments in state.processors:
            try:
                self.options[name] = processors[name].prepare(msgspec.json.decode(arguments))
            except ValueError as error:
                self.refusal = f"logits_processors: {name}: {str(error)[:_LONGEST_REASON]}"
            except Exception:  # a plug-in may raise anything; only this row fails
                self.refusal = f"logits_processors: {name} failed over its arguments"


def apply_to(
    processor: LogitsProcessor, name: str, logits: Tensor, index: Tensor, rows: Sequence[ProcessedRow]
) -> dict[int, str]:
    """Let a plug-in change the indexed rows of logits [all rows, vocab], in place.

    Returns:
        An error message by place in `rows`. If a plug-in fails over several rows together, each row is tried alone.
    """
    part = logits.index_select(0, index)
    try:
        logits.index_copy_(0, index, _checked(processor.apply(part.clone(), rows), part))
        return {}
    except Exception:  # a plug-in may raise anything
        if len(rows) == 1:
            return {0: f"the logits processor {name} failed"}
    failed = {}
    for place, row in enumerate(rows):
        if apply_to(processor, name, logits, index[place : place + 1], [row]):
            failed[place] = f"the logits processor {name} failed"
    return failed


def _checked(found: Any, given: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != given.shape or found.dtype != given.dtype:
        raise TypeError("apply must return scores of the shape and type that it was given")
    return found


def _importer(path: str) -> Callable[[], Any]:
    def load() -> Any:
        module, colon, name = path.partition(":")
        if not colon:
            raise ValueError("it must be given as name=module:Class")
        return getattr(import_module(module), name)

    return load
