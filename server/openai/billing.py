"""The line by which coding agents account for their requests: it stands before the system prompt and changes with each
request, so that no two prompts of a session would have a common beginning."""

import re

_LINE = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)\n*", re.IGNORECASE)


def without_billing(text: str) -> str:
    """A text of the system without the line, where it begins with it."""
    found = _LINE.match(text)
    return text if found is None else text[found.end() :]
