"""A server's processes, seen from the benchmark: started, waited for, and stopped while others have their turn."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from troupellm.load_tests.peers.process import LOG_TAIL, ContestantError
from troupellm.load_tests.peers.servers import ServerPlan

STOP_SECONDS = 20.0
POLL_SECONDS = 0.25


class ServerProcess:
    """One process group, from its start to its end."""

    def __init__(self, plan: ServerPlan, log: Path) -> None:
        self.plan, self._log = plan, log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                plan.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=plan.environment,
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.plan.port}"

    def wait_ready(self, timeout: float) -> None:
        """Until it lists its models.

        Raises:
            ContestantError: it died, or took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with httpx.Client(base_url=self.url, timeout=10.0, trust_env=False) as client:
            while True:
                if self._process.poll() is not None:
                    raise ContestantError(f"{self.plan.name}: its server ended\n{self._tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get("/v1/models").status_code == 200 and client.get("/health").status_code == 200:
                        return
                if time.monotonic() > deadline:
                    raise ContestantError(f"{self.plan.name}: no server in {timeout:g} s\n{self._tail()}")
                time.sleep(POLL_SECONDS)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Its turn; outside of it all of its processes are stopped."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.freeze()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._signal(signal.SIGKILL)  # what it left behind

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:] if self._log.exists() else ""
