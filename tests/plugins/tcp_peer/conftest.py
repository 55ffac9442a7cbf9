"""The connector as an engine opens it: the installed plug-in is found by its name."""

from tests.models.kv_connectors.conftest import connect as connect
