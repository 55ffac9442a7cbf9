"""Loads objects that installed packages name in entry points, for models and for their formats."""

from importlib.metadata import entry_points
from typing import Any, Final

from troupellm.protocol.errors import ModelLoadError, TroupeError

LONGEST_REASON: Final = 300
"""Characters of a plug-in's error that are shown."""


def find_plug_in(group: str, name: str) -> Any | None:
    """The object that a package has installed under a name; None where there is none.

    Raises:
        ModelLoadError: it cannot be imported.
    """
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except Exception as error:  # a plug-in may raise anything
            raise plug_in_error(group, name, error) from error
    return None


def plug_in_names(group: str) -> tuple[str, ...]:
    """The names of all that is installed."""
    return tuple(sorted(entry_points(group=group).names))


def plug_in_error(group: str, name: str, error: Exception) -> ModelLoadError:
    """The error of a plug-in that raised; one that is a `ModelLoadError` already is complete."""
    if isinstance(error, ModelLoadError):
        return error
    reason = error.message if isinstance(error, TroupeError) else str(error)
    return ModelLoadError(f"the plug-in {name} of {group} failed: {reason[:LONGEST_REASON] or type(error).__name__}")
