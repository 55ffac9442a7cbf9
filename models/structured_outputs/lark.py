"""Fragments of grammars in Lark, as llguidance reads them."""

import json
import re
from collections.abc import Mapping

from llguidance.gbnf_to_lark import gbnf_to_lark

from troupellm.models.structured_outputs.backend import GuideError


def literal(text: str) -> str:
    """A text as Lark writes it, which is JSON's way."""
    return json.dumps(text, ensure_ascii=False)


def literal_with_tokens(text: str, special: Mapping[str, int]) -> str:
    """The same with references to the tokens that a text never stands for.

    Args:
        special: such tokens by their texts; an answer has them as tokens of their own, or not at all.
    """
    if not special:
        return literal(text)
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text)
    written = [f"<[{special[part]}]>" if part in special else literal(part) for part in parts if part]
    return " ".join(written) or literal("")


def lark_of(text: str) -> str:
    """A grammar as Lark: rules with ::= are EBNF, everything else is Lark already.

    Raises:
        GuideError: EBNF that cannot be read.
    """
    if "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GuideError("the grammar is nested too deeply") from None
    except Exception as error:  # the converter may raise anything
        raise GuideError(f"the grammar cannot be read: {' '.join(str(error).split())[:200]}") from None
