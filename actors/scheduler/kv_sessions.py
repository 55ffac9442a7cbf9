"""Sessions by name: which blocks their last turns had, as keys of the prefix cache. Bounded, and holds no block."""

from bisect import bisect_left
from collections import Counter, OrderedDict

MOST_SESSIONS = 1024
"""Of one tenant; the one that was used the longest ago is forgotten for another."""
MOST_TURNS = 4
"""Of one session that do not continue each other, such as those of subagents."""

Keys = list[bytes]
"""The root of the key chain, then a key per full block."""


class KVSessions:
    def __init__(self, most_keys: int) -> None:
        """most_keys: of all sessions together."""
        self._most_keys = most_keys
        self._num_keys: Counter[str] = Counter()
        """By tenant."""
        self._sessions: dict[str, OrderedDict[str, dict[int, Keys]]] = {}
        """By tenant and session, by request; what was used last stands last."""
        self.num_forgotten = 0

    def __len__(self) -> int:
        return sum(map(len, self._sessions.values()))

    def turns(self, tenant: str, session: str) -> dict[int, Keys] | None:
        """By request, the newest last; None: there is no such session."""
        return self._sessions[tenant].get(session) if tenant in self._sessions else None

    def add(self, tenant: str, session: str, request: int, keys: Keys) -> None:
        """A turn of a session has ended. It takes the place of turns that it continues."""
        sessions = self._sessions.setdefault(tenant, OrderedDict())
        turns = sessions.setdefault(session, {})
        sessions.move_to_end(session)
        for number, older in list(turns.items()):
            if number == request or (len(older) <= len(keys) and older[-1] == keys[len(older) - 1]):
                self._num_keys[tenant] -= len(turns.pop(number))
        turns[request] = keys
        self._num_keys[tenant] += len(keys)
        while len(turns) > MOST_TURNS:
            self._num_keys[tenant] -= len(turns.pop(next(iter(turns))))
        while len(sessions) > MOST_SESSIONS:
            self._forget_oldest(tenant)
        while self._num_keys.total() > self._most_keys and len(self) > 1:
            self._forget_oldest(max(self._num_keys, key=self._num_keys.__getitem__))

    def drop(self, tenant: str, session: str) -> list[Keys] | None:
        """Forget a session; per turn the keys of the blocks that no other session of the tenant has.

        A key names all blocks before it too, so none that another session has follows one that it has not.

        Returns:
            None: there is no such session.
        """
        sessions = self._sessions.get(tenant, OrderedDict())
        turns = sessions.pop(session, None)
        if turns is None:
            return None
        self._left(tenant, turns)
        others = {key for other in sessions.values() for keys in other.values() for key in keys}
        return [keys[bisect_left(keys, True, lo=1, key=lambda key: key not in others) :] for keys in turns.values()]

    def _forget_oldest(self, tenant: str) -> None:
        sessions = self._sessions[tenant]
        _, turns = sessions.popitem(last=False)
        self._left(tenant, turns)
        self.num_forgotten += 1

    def _left(self, tenant: str, turns: dict[int, Keys]) -> None:
        """A session with these turns was taken out."""
        self._num_keys[tenant] -= sum(map(len, turns.values()))
        if not self._sessions[tenant]:
            del self._sessions[tenant], self._num_keys[tenant]

    def assert_invariants(self) -> None:
        counted = {
            tenant: sum(len(keys) for turns in sessions.values() for keys in turns.values())
            for tenant, sessions in self._sessions.items()
        }
        assert self._num_keys == counted, "keys of sessions are counted wrongly"
        assert all(len(sessions) <= MOST_SESSIONS for sessions in self._sessions.values()), "too many sessions"
