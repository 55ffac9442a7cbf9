"""A command that is started with closed standard streams or with blocked signals."""

import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1})
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from troupellm.server.cli.inherited import make_usable
make_usable()
first = os.open(os.devnull, os.O_RDONLY)
print("said"), sys.stdout.flush(), sys.stderr.write("complained"), sys.stderr.flush()
code = os.waitstatus_to_exitcode(os.waitpid(os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", "exit 7"]), 0)[1])
blocked = sorted(signal.Signals(number).name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
told = {"first": first, "code": code, "blocked": blocked, "stdin": sys.stdin.read()}
os.write(int(sys.argv[1]), json.dumps(told).encode())
"""


@pytest.mark.parametrize("closed", ["", "<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_exist_and_signals_are_heard(closed: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    told = tmp_path_factory.mktemp("told") / "told"
    command = f'exec "$@" 9>{told} {closed}'
    done = subprocess.run(
        ["/bin/sh", "-c", command, "sh", sys.executable, "-c", _PROGRAM, "9"],
        input="typed",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(told.read_text()) == {
        "first": 3,
        "code": 7,
        "blocked": ["SIGUSR1"],
        "stdin": "" if "<&-" in closed else "typed",
    }
    assert done.stdout == ("" if " >&-" in f" {closed}" else "said\n")
    assert done.stderr == ("" if "2>&-" in closed else "complained")
