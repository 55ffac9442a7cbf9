"""Guides: what a request's output must look like, and what has become of it on its way to the worker.

`GuideSpec` is what a request asks for. The guide actor turns it into a `GuideProgram`, which the worker runs beside the
sampler.
"""

from typing import Final, Literal, get_args

import msgspec

from troupellm.protocol.errors import InvalidRequest

GuideKind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]
KINDS: Final[tuple[str, ...]] = get_args(GuideKind)

MAX_SOURCE_BYTES = 256 * 1024
MAX_AFTER_CHARACTERS = 64
MOST_TEXT_BYTES: Final = 16 * 2**20
"""Of the grammars that a worker keeps; built, one takes several times as much."""
MOST_PROGRAMS: Final = 64
"""Grammars that a worker keeps: a lexer's memory of the texts that it has seen, up to 7 MB for a hostile one, lives as
long as its program."""

BuildOutcome = Literal["built", "late", "gone", "lost"]
"""How the building of a program by the worker ended. built: it has it, or a row will tell why it cannot. late: it took
too long. gone: there is no worker. lost: the question was not passed on."""

BACKENDS: Final = {
    "": "",
    "auto": "",
    "guidance": "llguidance",
    "llguidance": "llguidance",
    "xgrammar": "xgrammar",
}
"""Names that a request or the configuration may use, vLLM's among them; "" leaves the choice to the server."""
_REFUSED_BACKENDS = frozenset({"outlines", "lm-format-enforcer"})


class EarlyEnd(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The one end token that may come before a guide's mark, behind a call, where calls are messages of their own.

    A message is a header and, behind the mark that opens it, a text. It begins with a mark, or with the answer, whose
    prompt ends with its first words.
    """

    token: str
    starts: tuple[str, ...]
    """Marks with which a header begins, or goes on."""
    opens: str
    """The mark between header and text."""
    ends: tuple[str, ...]
    """Marks behind a message."""
    recipient: str
    """The text that the header of a call holds."""


class GuideSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the whole output, or on what follows a mark.

    Raises:
        InvalidRequest: an empty or too long source, or a backend that is not offered; `param` is `field`.
    """

    kind: GuideKind
    source: str = ""
    """json_object: empty. json_schema: the schema as JSON. regex: the pattern, which must match all of the output.
    choice: a JSON list of strings. grammar: Lark, or EBNF as llama.cpp's GBNF and xgrammar write it (rules with ::=).
    structural_tag: vLLM's JSON object, either of its two forms."""
    backend: str = ""
    """See `BACKENDS`."""
    after: str = ""
    """The text that ends thinking: until it was generated anything goes, but the end. Empty: from the first token."""
    early_end: EarlyEnd | None = None
    """An early end of the output, before `after`."""
    any_whitespace: bool = True
    """JSON may hold white space between its tokens; False allows none."""
    whitespace_pattern: str = ""
    """A regular expression for the white space of JSON instead."""
    additional_properties: bool = True
    """True as in JSON Schema for objects without `additionalProperties`; False forbids other properties there."""
    field: str = "structured_outputs"
    """The request field that errors name."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"{self.field} must be one of {', '.join(KINDS)}", param=self.field)
        if not isinstance(self.source, str):
            raise InvalidRequest(f"{self.field} must be text", param=self.field, code="invalid_type")
        if not self.source and self.kind != "json_object":
            raise InvalidRequest(f"{self.field} must not be empty", param=self.field, code="invalid_schema")
        if self._size() > MAX_SOURCE_BYTES:
            raise InvalidRequest(
                f"{self.field} must be at most {MAX_SOURCE_BYTES} bytes", param=self.field, code="invalid_schema"
            )
        if len(self.after) > MAX_AFTER_CHARACTERS:
            raise InvalidRequest(
                f"the mark after which {self.field} applies must be at most {MAX_AFTER_CHARACTERS} characters",
                param=self.field,
            )
        backend_of(self.backend, self.field)

    def _size(self) -> int:
        """Bytes of all texts. Raises InvalidRequest for half of a surrogate pair, which has none."""
        end = self.early_end
        early = () if end is None else (end.token, end.opens, end.recipient, *end.starts, *end.ends)
        try:
            return sum(len(text.encode()) for text in (self.source, self.after, self.whitespace_pattern, *early))
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{self.field} has half of a surrogate pair", param=self.field, code="invalid_schema"
            ) from None


def backend_of(name: str, field: str) -> str:
    """The backend that a name stands for; "" is the server's choice.

    Raises:
        InvalidRequest: it is not offered.
    """
    known = BACKENDS.get(name)
    if known is not None:
        return known
    offered = ", ".join(sorted(filter(None, BACKENDS)))
    if name in _REFUSED_BACKENDS:
        raise InvalidRequest(
            f"the backend {name} is not supported; use one of {offered}", param=field, code="unsupported_parameter"
        )
    raise InvalidRequest(f"backend must be one of {offered}", param=field)


class GuideProgram(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """A guide that was checked and fits its limits, as the worker runs it. Travels with the row's sampling state."""

    backend: str
    text: str
    """The backend's own form of the grammar."""
    after: str = ""
    """See `GuideSpec.after`."""
    early_end: EarlyEnd | None = None
    """See `GuideSpec.early_end`."""
    field: str = "structured_outputs"
    """The request field that errors name."""
    tenant: str = ""
    """Whose it is: a worker that has built it for one tenant builds it anew for another one."""
