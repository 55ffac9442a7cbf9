"""Fetch the wheels that a machine without a network lacks: run here, carry the folder there.

    python3 load_tests/gpu/wheels.py --folder .whl [--python 3.12] [PACKAGE ...]

The default is what the engine needs beside `THERE`, with what these need themselves. Standard library only.
"""

import argparse
import subprocess
import sys

THERE = (
    "torch", "triton", "transformers", "anyio", "httpx", "numpy", "safetensors", "tokenizers", "jinja2",
    "prometheus-client", "uvloop", "tqdm", "huggingface-hub",
)  # fmt: skip
"""The packages of a machine for training."""
PACKAGES = (
    "msgspec", "hypercorn", "llguidance", "python-multipart", "xxhash", "zstandard", "pyyaml", "h2", "hpack",
    "hyperframe", "priority", "wsproto",
)  # fmt: skip
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5))


def command(folder: str, python: str, package: str) -> list[str]:
    platforms = [part for name in (*PLATFORMS, "manylinux2014_x86_64", "any") for part in ("--platform", name)]
    return [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"),
        *(
            "--only-binary=:all:",
            "--python-version",
            python,
            "--implementation",
            "cp",
            *platforms,
            "-d",
            folder,
            package,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="fetch wheels for a machine without a network", allow_abbrev=False)
    parser.add_argument("packages", nargs="*", default=list(PACKAGES), metavar="PACKAGE")
    parser.add_argument("--folder", default=".whl")
    parser.add_argument("--python", default="3.12", help="version there")
    args = parser.parse_args()
    failed = [name for name in args.packages if subprocess.run(command(args.folder, args.python, name)).returncode]
    if failed:
        print(f"no wheel of {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
