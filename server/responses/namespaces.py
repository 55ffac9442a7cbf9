"""Functions in a namespace: a client finds them by two names, a model by one.

Earlier calls stand in the conversation under the same name that the model is offered now.
"""

from collections.abc import Mapping

Namespaced = Mapping[str, tuple[str, str]]
"""By the model's name of a function: its namespace, and its own name."""

_BETWEEN = "__"


def flat_name(namespace: str, name: str) -> str:
    """The model's name of a function, spelt as clients of MCP do it: `mcp__docs` and `search` are `mcp__docs__search`.

    Two functions may come to the same name so; they are refused like any two of one name.
    """
    return f"{namespace}{'' if namespace.endswith(_BETWEEN) else _BETWEEN}{name}"
