"""Bits of Lark, as llguidance reads it."""

import json

from llguidance.gbnf_to_lark import gbnf_to_lark

from troupellm.models.guides.backend import GuideError


def literal(text: str) -> str:
    """A text as Lark writes it, which is JSON's way."""
    return json.dumps(text, ensure_ascii=False)


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
    except Exception as error:  # the converter raises whatever its parser stumbles over
        raise GuideError(f"the grammar cannot be read: {' '.join(str(error).split())[:200]}") from None
