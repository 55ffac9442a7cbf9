"""Deliberate mistakes, to show that the simulator finds such: `python mutations.py [NAME ...]`.

Each is one edit of the engine's source, made while the module is imported in a process of its own; nothing on disk
changes. Prints the first seed that fails under each, or that none did.
"""

import argparse
import importlib.abc
import importlib.machinery
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

MOST_SEEDS: Final = 2000
_CHUNK = 50
_ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    module: str
    """Under troupellm."""
    right: str
    wrong: str
    """Takes the place of `right`, which occurs once."""


MUTATIONS: Final[dict[str, Mutation]] = {
    "a block is never given back": Mutation(
        "actors.kv_cache.block_pool",
        "            if references == 0:\n                if",
        "            if references == 0 and block != 2:\n                if",
    ),
    "an evicted block is still found": Mutation(
        "actors.kv_cache.block_pool", "            del self._block_of[key]\n", "            pass\n"
    ),
    "a block is found before it is full": Mutation(
        "actors.kv_cache.block_tables",
        "num_full = sequence.num_confirmed // size",
        "num_full = (sequence.num_confirmed + 1) // size",
    ),
    "a block that a window still shows is given back": Mutation(
        "actors.kv_cache.block_tables",
        "max(0, position - window) // self.block_size",
        "max(0, position - window + 2) // self.block_size",
    ),
    "a prefix is found though its window has a hole": Mutation(
        "actors.kv_cache.prefix_search",
        "            if self._found[index] is None:\n                most = index\n",
        "            if self._found[index] is None and index % 2:\n                most = index\n",
    ),
    "blocks are free while a plan may write them": Mutation(
        "actors.scheduler.running_set",
        "        if sequence.last_step <= self._in_flight.last_returned and not transfers:\n",
        "        if not transfers:\n",
    ),
    "a preempted sequence keeps its epoch": Mutation("actors.sequences.sequence", "        self.epoch += 1\n", ""),
    "the last come is the first served": Mutation(
        "actors.scheduler.waiting_queue", ", ordinal, index)", ", -ordinal, index)"
    ),
    "an answer is one token too long": Mutation(
        "actors.scheduler.append_tokens", "if len(known) >= sequence.limit:", "if len(known) > sequence.limit:"
    ),
    "a reader who reads again is forgotten": Mutation(
        "actors.output.outbox", "self._undelivered <= self._budget / 2", "self._undelivered < self._budget / 2 - 1"
    ),
    "a crash leaves those who waited alone": Mutation(
        "actors.runtime.supervise", "                child.on_crash(causes[0], owed)\n", ""
    ),
    "an actor that was cancelled stays deaf": Mutation(
        "actors.runtime.supervise", "if self._stopping or all(", "if True or all("
    ),
    "plans after a loss go under the old epoch": Mutation(
        "actors.scheduler.replay", "        self._planner.engine_epoch += 1\n", ""
    ),
    "plans that were lost are waited for": Mutation(
        "actors.scheduler.replay", "        self._in_flight.forget()\n", ""
    ),
    "one death is enough for a conviction": Mutation(
        "actors.scheduler.quarantine", "DEATHS_TO_BLAME = 2", "DEATHS_TO_BLAME = 1"
    ),
    "the watchdog looks on": Mutation("actors.engine.system", "            mailbox.nudge()\n", "            pass\n"),
    "the tenant that was served most is next": Mutation(
        "actors.scheduler.fair_share",
        "served = self._served.get(tenant, 0.0)",
        "served = -self._served.get(tenant, 0.0)",
    ),
    "newcomers go behind everybody": Mutation(
        "actors.scheduler.fair_share", "min(others) - _HEAD_START", "max(others) + _HEAD_START"
    ),
    "priorities of tenants do not count": Mutation(
        "actors.scheduler.submissions", "known.priority * _PRIORITY_SPAN", "0 * _PRIORITY_SPAN"
    ),
    "a beam writes where its sibling reads": Mutation(
        "actors.kv_cache.block_tables",
        "if all(pool.references(table[last]) == 1",
        "if True or all(pool.references(table[last]) == 1",
    ),
    "a beam goes on from itself": Mutation(
        "actors.sequences.beam_search", "Step(place, beam.place, token)", "Step(place, place, token)"
    ),
    "a fork begins behind a copy that is not made": Mutation(
        "actors.kv_cache.block_tables", "if num_copied and beginnings[group] != fresh[0]:", "if False:"
    ),
    "forks give back one place": Mutation(
        "actors.admission.admission",
        "        self._give_back(tenant, sequences, tokens)\n        self._serve()",
        "        self._give_back(tenant, 1, tokens)\n        self._serve()",
    ),
    "who stands in line is not called": Mutation(
        "actors.admission.admission",
        "        self._give_back(tenant, sequences, tokens)\n        self._serve()",
        "        self._give_back(tenant, sequences, tokens)",
    ),
    "a tenant's sequences leave one by one": Mutation(
        "actors.admission.quotas", "account.inside -= sequences", "account.inside -= 1"
    ),
    "kills from outside are held against the request": Mutation(
        "actors.worker.remote_worker", "fault=not outside", "fault=True"
    ),
    "the spare process is left behind": Mutation(
        "actors.worker.process_host", "for worker in (self._worker, self._spare) if", "for worker in (self._worker,) if"
    ),
    "some ends are not counted": Mutation(
        "actors.scheduler.open_requests",
        "        self.stats.append(_request_stats(",
        "        request.error or self.stats.append(_request_stats(",
    ),
    "where accepted drafts lead is forgotten, when tokens are forced": Mutation(
        "actors.scheduler.speculative_rows",
        "sequence.num_computed = len(sequence.tokens) + accepted + ahead",
        "sequence.num_computed = len(sequence.tokens) + ahead",
    ),
    "where accepted drafts lead is forgotten": Mutation(
        "actors.scheduler.append_tokens",
        "sequence.num_computed = len(known) + count - 1 + ahead",
        "sequence.num_computed = len(known) + ahead",
    ),
    "a forced token counts as computed at once": Mutation(
        "actors.scheduler.append_tokens",
        "sequence.forced = max(0, len(sequence.tokens) - 1 - confirmed)",
        "sequence.forced = 0",
    ),
    "only one of two plans in flight has blocks for its drafts": Mutation(
        "actors.scheduler.speculative_rows",
        "if reserved + width <= sequence.no_check_until and",
        "if start + 1 <= sequence.no_check_until and",
    ),
    "what refused drafts had reserved is kept": Mutation(
        "actors.scheduler.append_tokens",
        "                    sequence.num_lookahead_tokens -= limit\n",
        "                    pass\n",
    ),
    "every row drafts as if it were alone": Mutation(
        "actors.scheduler.speculative_rows",
        "return wanted if wanted * num_rows <= spare else max(0, spare // num_rows)",
        "return max(0, min(wanted, spare))",
    ),
    "a block is given away while a load writes it": Mutation(
        "actors.kv_offload.loads", "        return loading.pending\n", "        return set()\n"
    ),
    "a place is given away while it is read": Mutation(
        "actors.kv_offload.host_slots", "return self._blocks[key].pins > 0", "return self._blocks[key].pins > 9"
    ),
    "a load that ends late is taken for its successor's": Mutation(
        "actors.kv_offload.loads", "        if sequence.tiers.loading is not loading:\n", "        if False:\n"
    ),
    "a transfer that ends late keeps its place": Mutation(
        "actors.kv_offload.transfers",
        "            done(answer)\n",
        "            if self._load[edge] or answer.ok:\n                done(answer)\n",
    ),
    "a transfer that fails keeps its credit": Mutation(
        "actors.kv_offload.transfers", "self._load[edge] -= 1", "self._load[edge] -= answer.ok"
    ),
    "a block is found in host memory before it is there": Mutation(
        "actors.kv_offload.host_slots", "if block is not None and block.ready else", "if block is not None else"
    ),
    "a block is found on the device though its load failed": Mutation(
        "actors.kv_offload.loads",
        "        if answer.ok:\n            self._cost",
        "        if True:\n            self._cost",
    ),
    "a failed load is taken for a good one": Mutation(
        "actors.kv_offload.loads",
        "            loading.failed = True\n            # It would",
        "            loading.failed = False\n            # It would",
    ),
    "host memory is believed to survive the worker": Mutation(
        "actors.scheduler.kv_offload", "        if keep_host:\n", "        if True:\n"
    ),
    "what was being fetched is found though it did not come": Mutation(
        "actors.kv_offload.host_slots",
        "            self._drop(block)\n        elif",
        "            block.ready = True\n        elif",
    ),
    "requests of a front that fell run on": Mutation(
        "actors.engine.api_process_session",
        "                outbox.abort()\n            await open_outboxes[0]",
        "                pass\n            await open_outboxes[0]",
    ),
    "a place that a front did not use is kept": Mutation(
        "actors.engine.api_process_session", "            if not handed_over:\n", "            if False:\n"
    ),
    "a reader behind a front who reads again is forgotten": Mutation(
        "actors.engine.api_process_session", "            if not held:\n", "            if held:\n"
    ),
    "the worker hears of a slot's adapter only once": Mutation(
        "actors.scheduler.adapter_slots",
        "            slot.digest, slot.since, slot.closed = adapter.digest, self.now, False\n",
        "            known, slot.digest, slot.since = slot.digest, adapter.digest, self.now\n"
        "            if known:\n                slot.rows[sequence.row] = sequence\n                return\n",
    ),
    "a preempted sequence keeps its slot": Mutation(
        "actors.scheduler.running_set",
        "        if sequence.request.adapter is not None:\n            self.adapter_slots.leave(sequence)\n",
        "        if sequence.ended and sequence.request.adapter is not None:\n"
        "            self.adapter_slots.leave(sequence)\n",
    ),
    "a new worker is believed to have the adapters of the last one": Mutation(
        "actors.scheduler.adapter_gate", "        self._loaded.clear()\n", ""
    ),
    "an adapter is dropped though a plan in flight copies it": Mutation(
        "actors.scheduler.adapter_gate",
        "if step <= last_returned and digest not in kept]",
        "if digest not in kept]",
    ),
    "what a lost worker has read counts": Mutation(
        "actors.scheduler.adapter_gate", "        if lost:\n", "        if False:\n"
    ),
    "blocks of one adapter are found by another": Mutation(
        "actors.input.prepare",
        "cache_salt=asked.cache_salt, adapter=adapter, media=media",
        "cache_salt=asked.cache_salt, media=media",
    ),
    "a snapshot has the name of the block before it": Mutation(
        "actors.kv_cache.state_tables",
        "key = self._names.extend_keys(sequence, start // size)[start // size]",
        "key = self._names.extend_keys(sequence, start // size)[start // size - 1]",
    ),
    "a state is copied from where it is not yet": Mutation(
        "actors.kv_cache.state_slots", "return self._copies.get(slot, slot)", "return slot"
    ),
    "a failed sequence's slot is lost": Mutation(
        "actors.kv_cache.state_tables",
        "        if slot != NO_SLOT:\n            self.slots.release(slot)\n",
        "",
    ),
    "a prefix with a tail is found without it": Mutation("actors.kv_cache.state_slots", "== len(tail)]", ">= 0]"),
    "the message in hand is lost in a crash": Mutation(
        "actors.runtime.mailbox", "= [] if self.in_hand is None else [self.in_hand]", "= []"
    ),
}


class _Finder(importlib.abc.MetaPathFinder):
    """Loads one module from its changed source."""

    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != f"troupellm.{self._mutation.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, changed_source(self._mutation))
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:  # past the cache of compiled files
        return compile(self._source, self.path, "exec")


def changed_source(mutation: Mutation) -> str:
    """Raises ValueError when the edit does not fit the source any more."""
    source = (_ROOT / (mutation.module.replace(".", "/") + ".py")).read_text()
    if source.count(mutation.right) != 1:
        raise ValueError(
            f"{mutation.module} has {mutation.right!r} {source.count(mutation.right)} times instead of once"
        )
    return source.replace(mutation.right, mutation.wrong)


def first_failure(name: str, most_seeds: int = MOST_SEEDS) -> tuple[int, str] | None:
    """The first seed that fails with a mutation, and how; in this process, which must not have imported the engine."""
    sys.meta_path.insert(0, _Finder(MUTATIONS[name]))
    from simulator.runner import run_seed

    for seed in range(most_seeds):
        verdict = run_seed(seed)
        if verdict.failures:
            return seed, verdict.failures[0]
    return None


def search(names: Sequence[str], jobs: int) -> dict[str, tuple[int, str] | None]:
    """By mutation; each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(first_failure, names), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MUTATIONS))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    found = search(options.names, options.jobs)
    for name, failure in found.items():
        print(f"{name}: {'NOT FOUND' if failure is None else f'seed {failure[0]}: {failure[1]}'}")
    return 1 if None in found.values() else 0


if __name__ == "__main__":
    sys.exit(main())
