"""Whose something is that outlives its request."""

import hashlib

from troupellm.server.exchange import Exchange

NOBODY = ""
"""Where no keys are checked, everything belongs to everybody."""


def owner_of(exchange: Exchange) -> str:
    """A name for the key of a request that the gate has let in, which no other key ever has.

    Names of keys do not serve: those without one are numbered in the order they are given, which may be another one
    after the next start.
    """
    if not exchange.key:
        return NOBODY
    given = exchange.header(b"x-api-key") or (exchange.header(b"authorization") or "").partition(" ")[2]
    return hashlib.sha256(b"owner\0" + given.strip().encode("latin-1")).hexdigest()
