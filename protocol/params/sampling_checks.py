"""Sampling options beside the distribution: a budget for reasoning, an end to repetition, plug-ins."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.checks import check_integer

MAX_PATTERN = 256
"""Tokens of a repeated pattern."""
MAX_REPEATS = 1_024
MAX_MARK = 64
"""Characters of a mark around thinking."""
MAX_PROCESSORS = 8
"""Logits processors of one request."""
MAX_ARGUMENT_BYTES = 4_096
"""JSON of one logits processor's arguments."""
MAX_ARGUMENTS = 16
MAX_NAME = 64


class ThinkingMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The texts between which a model thinks."""

    start: str
    """"" where the model only says when it has done."""
    end: str
    open: bool | None = None
    """Whether the answer begins inside thinking; None: as the marks in the prompt tell."""


class StopRegion(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the text in which stop strings do not count."""

    opens: str
    closes: tuple[str, ...] = ()
    """Marks of which the first one ends it; without any it goes on to the end of the text."""
    firsts: str = ""
    """Characters of which one must follow the opening mark and white space; without any, and without names, all may."""
    names: tuple[str, ...] = ()
    """Names of which one may follow instead."""
    at: Literal["any", "start", "answer"] = "any"
    """Where the opening mark counts. start: where nothing but white space has come. answer: where nothing but white
    space and reasoning has."""
    header: str = ""
    """The mark that ends the header of a message. "": there is none, and stop strings count nowhere in the region."""
    silent: str = ""
    """A regular expression of headers, with the opening mark; stop strings count in the messages of others."""


class StopScope(msgspec.Struct, frozen=True, kw_only=True):
    """Stop strings count in content only: neither in reasoning nor in tool calls."""

    regions: tuple[StopRegion, ...]
    opens: tuple[str, ...] = ()
    """Marks of reasoning, which a prompt may end with."""
    closes: tuple[str, ...] = ()
    always: bool = False
    """The answer begins with reasoning unless the prompt has closed it."""
    open: bool | None = None
    """Whether the answer begins inside of reasoning; None: as the marks in the prompt tell."""


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a sequence whose last tokens are a pattern said `min_count` times in a row, with vLLM's names."""

    max_pattern_size: int
    """Tokens."""
    min_pattern_size: int = 1
    min_count: int = 2


def check_thinking(budget: Any, marks: Any) -> None:
    """
    Raises:
        InvalidRequest: names the field.
    """
    if budget is not None:
        check_integer("thinking_token_budget", budget, -1, 2**31 - 1)
    if marks is None:
        return
    if not isinstance(marks, ThinkingMarks) or not marks.end or max(len(marks.start), len(marks.end)) > MAX_MARK:
        raise InvalidRequest(
            f"thinking must be ThinkingMarks with texts of at most {MAX_MARK} characters", param="thinking"
        )


def check_stop_scope(scope: Any) -> None:
    """
    Raises:
        InvalidRequest: it is something else than a `StopScope`.
    """
    if not isinstance(scope, StopScope):
        raise InvalidRequest("stop_scope must be a StopScope", param="stop_scope", code="invalid_type")


def check_repetition(wanted: Any) -> None:
    """
    Raises:
        InvalidRequest: names `repetition_detection` or the field in it.
    """
    name = "repetition_detection"
    if not isinstance(wanted, RepetitionDetection):
        raise InvalidRequest(f"{name} must be RepetitionDetection(...)", param=name, code="invalid_type")
    check_integer(f"{name}.max_pattern_size", wanted.max_pattern_size, 1, MAX_PATTERN)
    check_integer(f"{name}.min_pattern_size", wanted.min_pattern_size, 1, wanted.max_pattern_size)
    check_integer(f"{name}.min_count", wanted.min_count, 2, MAX_REPEATS)


def check_processors(processors: Any, extra_args: Any) -> None:
    """Plain data by name, and not much of it: nothing that comes with a request is ever code.

    Raises:
        InvalidRequest: names the field.
    """
    if processors is not None:
        wrong = not isinstance(processors, Mapping) or not all(
            isinstance(args, Mapping) for args in processors.values()
        )
        if wrong or len(processors) > MAX_PROCESSORS:
            raise InvalidRequest(
                f"logits_processors must be at most {MAX_PROCESSORS} names with their arguments",
                param="logits_processors",
            )
        for name, args in processors.items():
            _check_arguments("logits_processors", {name: 0})
            _check_arguments("logits_processors", args)
    if extra_args is not None:
        if not isinstance(extra_args, Mapping):
            raise InvalidRequest("extra_args must be a mapping", param="extra_args", code="invalid_type")
        _check_arguments("extra_args", extra_args)


def _check_arguments(field: str, args: Mapping[Any, Any]) -> None:
    if len(args) > MAX_ARGUMENTS or not all(isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in args):
        raise InvalidRequest(
            f"{field} must have at most {MAX_ARGUMENTS} names of 1 to {MAX_NAME} characters", param=field
        )
    try:
        size = len(msgspec.json.encode(args))
    except (TypeError, ValueError, RecursionError, OverflowError):
        raise InvalidRequest(f"{field} must hold plain data", param=field, code="invalid_type") from None
    if size > MAX_ARGUMENT_BYTES:
        raise InvalidRequest(f"{field} must hold at most {MAX_ARGUMENT_BYTES} bytes of JSON", param=field)
