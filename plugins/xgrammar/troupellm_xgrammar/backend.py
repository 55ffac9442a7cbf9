"""The guide backend of the package xgrammar. It compiles ahead, and forces no tokens."""

import json
from collections.abc import Mapping, Sequence
from time import thread_time
from typing import Any, Final, cast

import torch

from troupellm.models.structured_outputs.backend import BackendError, GuideError, Masks, Matcher
from troupellm.models.structured_outputs.lark import literal
from troupellm.models.structured_outputs.schema_normalise import plain_schema
from troupellm.models.structured_outputs.to_lark import close_objects, object_of, read_json
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.guide import GuideSpec
from troupellm_xgrammar.schema import check_schema

MOST_GRAMMAR_CHARACTERS: Final = 16 * 1024
"""Largest grammar or pattern. The cost of one byte of text grows with the square of its size, and cannot be
interrupted. Compilation tries only the bytes that may come first."""
MOST_COMPILED_BYTES: Final = 32 * 2**20
"""Most memory of one grammar, which lives as long as it is kept."""
ACCEPT_SECONDS: Final = 2e-4
"""CPU time allowed for taking in one token."""
ACCEPT_WEIGHT: Final = 10
"""Factor on the time beyond it. The number of ways in which a text may be read has no limit. They cost this time and,
unlike those that a mask tries, are kept for each byte."""
HOPELESS_SECONDS: Final = 1.0
"""A mask is no longer begun if the tokens before it are charged with this much."""
_LONGEST_REASON = 300
_TOO_MUCH_MEMORY = "it takes too much memory to compile"


def xgrammar_text(spec: GuideSpec, depth: int) -> str:
    """A guide as this backend's `compile` reads it: JSON.

    Raises:
        GuideError: it cannot be served by this backend.
    """
    if spec.whitespace_pattern:
        raise GuideError("whitespace_pattern is not supported by the backend xgrammar")
    match spec.kind:
        case "json_object" | "json_schema":
            schema = {"type": "object"} if spec.kind == "json_object" else read_json(spec.source, depth)
            if isinstance(schema, bool):
                schema = object_of(schema)
            if not isinstance(schema, dict):
                raise GuideError("a JSON schema is an object, true or false")
            made = {"schema": json.dumps(_prepared(schema, spec)), "any_whitespace": spec.any_whitespace}
        case "regex":
            made = {"regex": _bounded(spec.source)}
        case "choice":
            made = {"ebnf": "root ::= " + " | ".join(map(literal, read_json(spec.source, depth)))}
        case "grammar":
            made = {"ebnf" if "::=" in spec.source else "lark": _bounded(spec.source)}
        case "structural_tag":
            made = {"structural_tag": json.dumps(_prepared_tag(read_json(spec.source, depth), spec))}
    return json.dumps(made)


def _bounded(text: str) -> str:
    """A grammar or a pattern. Raises GuideError: it is too large for this backend."""
    if len(text) > MOST_GRAMMAR_CHARACTERS:
        raise GuideError(
            f"grammars and patterns of more than {MOST_GRAMMAR_CHARACTERS} characters are not supported by the backend "
            "xgrammar"
        )
    return text


def _prepared(schema: Any, spec: GuideSpec) -> Any:
    """Raises GuideError: it has keywords that would be passed over."""
    plain = plain_schema(schema if spec.additional_properties else close_objects(schema))
    check_schema(plain)
    return plain


def _prepared_tag(tag: Any, spec: GuideSpec) -> Any:
    """A structural tag with each schema in it prepared, in both of its forms."""
    if isinstance(tag, list):
        return [_prepared_tag(part, spec) for part in tag]
    if not isinstance(tag, dict):
        return tag
    for name in ("grammar", "pattern"):
        _bounded(str(tag.get(name, "")))
    holds = "json_schema" if "type" in tag else "schema"
    return {
        name: _prepared(value, spec) if name == holds else _prepared_tag(value, spec) for name, value in tag.items()
    }


class XGrammarMatcher:
    """Implements `Matcher`. It stops when an end token was drawn, which comes a step after the last of the text."""

    __slots__ = ("_failed", "_unpaid", "inner")

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._failed: str | None = None
        self._unpaid: list[float] = []
        """CPU seconds beyond those that they may take, of each token since `owed` was asked."""

    @property
    def stopped(self) -> bool:
        return bool(self.inner.is_terminated())

    @property
    def accepting(self) -> bool:
        return bool(self.inner.is_completed() or self.inner.is_terminated())

    @property
    def error(self) -> str | None:
        return self._failed

    @property
    def spent(self) -> bool:
        return False

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            begin = thread_time()
            fits = not self.inner.is_terminated() and self.inner.accept_token(token_id)
            self._unpaid.append(max(0.0, thread_time() - begin - ACCEPT_SECONDS))
            if not fits:
                self._failed = "the output does not fit it"
                return False
        return True

    def owed(self) -> float:
        """CPU seconds that the tokens since it was asked last are charged with."""
        seconds = ACCEPT_WEIGHT * sum(self._unpaid)
        self._unpaid.clear()
        return seconds

    def fits(self, token_id: int) -> bool:
        if self.inner.is_terminated() or not self.inner.accept_token(token_id):
            return False
        self.inner.rollback(1)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.inner.rollback(num_tokens)
            del self._unpaid[-num_tokens:]  # drafts are charged only when their masks are filled

    def forced(self) -> list[int]:
        """Always empty: xgrammar knows forced text, which may be cut into tokens in many ways."""
        return []

    def copy(self) -> "XGrammarMatcher":
        return XGrammarMatcher(self.inner.fork())


class XGrammar:
    """Implements `Backend`."""

    name = "xgrammar"
    program_text = staticmethod(xgrammar_text)

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, num_threads: int) -> None:
        """
        Args:
            num_tokens: that masks speak of.

        Raises:
            BackendError: there is no xgrammar, or this model has no end token, or tokens that are no plain bytes.
        """
        try:
            import xgrammar
        except ImportError:
            raise BackendError("the backend xgrammar is not installed: its package xgrammar is missing") from None
        if tokenizer.form == "other" or not tokenizer.eos_token_ids:
            raise BackendError("the backend xgrammar cannot guide a model with this tokenizer")
        special = tokenizer.special_token_ids
        pieces = [b"" if token in special else tokenizer.token_bytes(token) for token in range(tokenizer.size)]
        self._xgrammar: Any = xgrammar
        info = xgrammar.TokenizerInfo(
            pieces,
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=num_tokens,
            stop_token_ids=sorted(tokenizer.eos_token_ids),
        )
        self._compiler: Any = xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
        self.special_tokens: Mapping[str, int] = {}

    def compile(self, text: str) -> XGrammarMatcher:
        made, compiler = json.loads(text), self._compiler
        try:
            match made:
                case {"schema": schema, "any_whitespace": free}:
                    grammar = compiler.compile_json_schema(schema, any_whitespace=free, strict_mode=False)
                case {"regex": pattern}:
                    grammar = compiler.compile_regex(pattern)
                case {"ebnf": ebnf}:
                    grammar = compiler.compile_grammar(ebnf)
                case {"lark": lark}:
                    grammar = compiler.compile_lark(lark)
                case {"structural_tag": tag}:
                    grammar = compiler.compile_structural_tag(tag)
                case _:
                    raise GuideError("this is no guide of the backend xgrammar")
        except (RuntimeError, ValueError, TypeError) as error:  # the library's own code raises these
            if "bad_alloc" in str(error):
                raise GuideError(_TOO_MUCH_MEMORY) from None
            raise GuideError(" ".join(str(error).split())[-_LONGEST_REASON:] or "it cannot be compiled") from None
        if grammar.memory_size_bytes > MOST_COMPILED_BYTES:
            raise GuideError(_TOO_MUCH_MEMORY)
        return XGrammarMatcher(self._xgrammar.GrammarMatcher(grammar))

    def fill(self, matchers: Sequence[Matcher], masks: Masks) -> Sequence[float]:
        """Charges each with the tokens since the last time as well."""
        tensor = torch.from_numpy(masks)
        seconds = []
        for index, matcher in enumerate(cast(Sequence[XGrammarMatcher], matchers)):
            owed = matcher.owed()
            begin = thread_time()
            if owed > HOPELESS_SECONDS:
                masks[index] = 0
            elif not matcher.inner.fill_next_token_bitmask(tensor, index):
                masks[index] = -1  # all may come
            seconds.append(thread_time() - begin + owed)
        return seconds
