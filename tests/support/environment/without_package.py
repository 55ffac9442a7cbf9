"""A fresh Python in which one installed package is missing, as on a machine that never had it."""

import subprocess
import sys
from pathlib import Path

_START = "import site, sys; site.addsitedir(sys.argv.pop(1)); exec(sys.argv.pop(1))"


def run_without(package: str, program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program text; `folder` becomes a site folder of links to all installed packages but this one."""
    for place in (Path(place) for place in sys.path if place.endswith("site-packages")):
        for entry in place.iterdir():
            plain = entry.suffix != ".pth" or "editable" in entry.name  # other .pth files lead to further packages
            if plain and entry.name != package and not (folder / entry.name).exists():
                (folder / entry.name).symlink_to(entry)
    command = [sys.executable, "-S", "-c", _START, str(folder), program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)
