r"""The GPU's goals on a bare machine without a network, from the repository's root:

    python3 -m pip install --no-index --no-deps --target .whl/site .whl/*.whl    # what the machine lacks; see wheels.py
    set -o pipefail
    PYTHONPATH=.whl/site python3 load_tests/gpu/run.py --hour --after gpu.json \
        --result-json "$OUT/gpu.json" --page "$OUT/gpu.md" 2>&1 | tee "$OUT/log"

OUT is a folder that outlives the machine. Correctness at real shapes first, then the device's ceilings, then goal by
goal. Findings are printed and written after each of them, so that a time-out loses none; goals without time
or without a measurement are named.
"""

import sys
import tempfile
from pathlib import Path


def main() -> int:
    sys.path.pop(0)  # this folder, whose files are no modules of their own
    with tempfile.TemporaryDirectory(prefix="troupe-gpu-") as name:
        try:
            import troupellm  # noqa: F401 (installed, or not)
        except ImportError:
            (Path(name) / "troupellm").symlink_to(Path(__file__).resolve().parents[2])
            sys.path.insert(0, name)
        from troupellm.load_tests.gpu.session import run

        return run(sys.argv[1:], Path(name))


if __name__ == "__main__":
    sys.exit(main())
