"""The imports of a benchmark's contestants."""

from pathlib import Path

import troupellm
from troupellm.load_tests.peers.environments import link_package


def test_a_link_to_other_files_is_made_anew(tmp_path: Path) -> None:
    files = Path(troupellm.__file__).resolve().parent
    for former in (tmp_path / "gone", tmp_path):
        place = tmp_path / "import" / "troupellm"
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(former)
        for _ in range(2):
            assert (link_package(tmp_path / "import") / "troupellm").resolve() == files
