"""The tables of stored responses."""

from pathlib import Path

from troupellm.server.storage.database import Schema, open_database, told_as_config_error

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL, background INTEGER NOT NULL,
    logged INTEGER NOT NULL, body BLOB NOT NULL, items BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL,
    expires REAL NOT NULL, runner TEXT NOT NULL, lease REAL NOT NULL, border INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS responses_by_owner ON responses (owner, status, bytes, used);
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (expires, status);
CREATE INDEX IF NOT EXISTS responses_that_run ON responses (lease) WHERE status IN ('queued', 'in_progress');
CREATE TABLE IF NOT EXISTS events (
    id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, first INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (id, first)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evictions (reason TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
"""
SCHEMA = Schema(
    setting="responses_store",
    version=1,
    tables=_TABLES,
    synchronous="NORMAL",
    later_columns=(("responses", "border", "INTEGER NOT NULL DEFAULT 0"),),
)


def check_database(path: str | None) -> None:
    """Open and close it once, before anything is served.

    Raises:
        ConfigError: it cannot be used.
    """
    if path is not None:
        with told_as_config_error(SCHEMA.setting, Path(path)):
            open_database(SCHEMA, Path(path)).close()
