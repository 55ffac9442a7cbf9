"""The arrows between packages and between their rooms, read from the syntax trees.

Imports inside functions and for types count as well.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "troupellm"
LAYERS = ("protocol", "kernels", "models", "actors", "server", "load_tests", "training")
"""Each imports itself and those before it."""
FLOORS = {
    "protocol": (
        "quota",
        "errors",
        "params vllm",
        "config",
        "messages",
        "api",
        "wire",
    ),
    "kernels": (
        "common",
        "act_quant cpp grouped_linear",
        "gated_act kv_quant meeting quantized_linear rms_norm sampling short_conv",
        "decode_io gated_delta linear rope_kv_write",
        "fused_moe low_rank paged_attention",
        "fused_decoder mla_attention",
    ),
    "models": (
        "builtin hub processes sampling",
        "config",
        "families gguf tokenizer",
        "chat_template checkpoint",
        "adapters",
        "layers quantization",
        "batch transformers_backend",
        "kv_offload media memory parallel structured_outputs",
        "chat_parsers kv_connectors load",
        "proposers",
        "speculation",
        "runner",
        "gpu",
        "worker",
    ),
    "actors": (
        "runtime sequences",
        "adapters admission guide kv_cache metrics output worker",
        "client input kv_offload media",
        "scheduler",
        "engine",
        "llm remote",
        "replicas",
    ),
    "server": (
        "base",
        "access http storage",
        "observe",
        "host",
        "admin batches openai",
        "messages openapi pooling responses",
        "ollama page",
        "app",
        "api_processes replica_process",
        "serve",
        "cli",
        "vllm_api",
    ),
}
"""The rooms of each package from the lowest floor up. A room imports lower floors only, so no circle exists."""
TORCH_FREE_MODELS = (
    "adapters/files",
    "hub/source",
    "tokenizer/tokenizer",
    "chat_template/template",
    "config/generation_config",
)
TORCH_INSIDE_A_FUNCTION = {
    "server/cli/collect_env.py",
    "load_tests/contestants/generation.py",
}
TORCH_INSIDE_A_FUNCTION |= {
    "load_tests/contestants/vllm_scheduler.py",
    "load_tests/contestants/embedding.py",
}
TORCH_INSIDE_A_FUNCTION |= {"load_tests/peers/sides/transformers_side.py"}
"""One reports which torch there is, the others run transformers and vLLM to compare with; none loads it on import."""
BENCHMARKS_OF_THE_STEP = tuple(
    f"load_tests/{name}"
    for name in (
        "kernels/",
        "step/",
        "gpu/",
        "bench/kernels.py",
        "bench/step.py",
        "quality/checkpoint.py",
        "workers/host_time.py",
    )
)
"""They measure kernels and models, and use torch as those do."""
ASSEMBLY = ("engine", "llm", "remote", "replicas")
"""The rooms of actors/ that know which actors exist, and may import them."""

FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((NAME, *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES = {module_of(path): path for path in FILES}


def imported(node: ast.AST) -> Iterator[str]:
    """The names of one import statement; `from package import module` gives the module."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            assert level == 0, "imports are absolute"
            for alias in names:
                yield (f"{module}.{alias.name}" if module in MODULES or module == NAME else str(module))
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
            args=[first, *_],
        ):
            if isinstance(first, ast.Constant):
                yield str(first.value)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    return tuple(name for node in ast.walk(tree_of(path)) for name in imported(node))


@cache
def imports_at_load(path: Path) -> tuple[str, ...]:
    """The modules that are loaded with it: imports in functions and for types alone are left out."""
    names: list[str] = []
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        names += imported(node)
        waiting.extend(ast.iter_child_nodes(node))
    return tuple(names)


def home_of(name: str) -> str | None:
    """The module of ours that an imported name lives in; None for what is not ours."""
    while name not in MODULES:
        name, _, _ = name.rpartition(".")
        if not name:
            return None
    return name


def layer_of(name: str) -> int | None:
    """Rank of an imported name; the root's public names reach up to the server. None for what is not ours."""
    parts = name.split(".")
    if parts[0] != NAME or parts[1:] == ["__version__"]:
        return None
    return LAYERS.index(parts[1]) if len(parts) > 1 and parts[1] in LAYERS else LAYERS.index("server")


def place_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_point_one_way() -> None:
    assert len(FILES) > 1000
    upward = {
        (place_of(path), name)
        for path in FILES
        for name in imports_of(path)
        if (rank := layer_of(name)) is not None and rank > LAYERS.index(path.relative_to(ROOT).parts[0])
    }
    assert not upward


def room_of(module: str) -> tuple[str, str] | None:
    """Package and room of a module; None outside of the rooms."""
    parts = module.split(".")
    return (parts[1], parts[2]) if len(parts) > 2 and parts[1] in FLOORS else None


FLOOR_OF = {
    (package, room): number
    for package, floors in FLOORS.items()
    for number, rooms in enumerate(floors, 1)
    for room in rooms.split()
}


def test_every_folder_is_a_room_with_a_floor() -> None:
    found = {room for module in MODULES if (room := room_of(module)) is not None}
    assert found == FLOOR_OF.keys()
    assert max(len(path.relative_to(ROOT).parts) for path in FILES if path.relative_to(ROOT).parts[0] in FLOORS) == 3


def room_imports() -> Iterator[tuple[Path, tuple[str, str], tuple[str, str]]]:
    """Each file in a room with its room, and each other room of the same package that the file imports."""
    for path in FILES:
        own = room_of(module_of(path))
        if own is None:
            continue
        homes = {home for name in imports_of(path) if (home := home_of(name)) is not None}
        for room in {room_of(home) for home in homes} - {own, None}:
            assert room is not None
            if room[0] == own[0]:
                yield path, own, room


def test_a_room_imports_rooms_of_lower_floors_only() -> None:
    found = list(room_imports())
    assert len(found) > 500, len(found)
    assert not {(place_of(path), room) for path, own, room in found if FLOOR_OF[room] >= FLOOR_OF[own]}


def test_protocol_needs_msgspec_and_the_standard_library_only() -> None:
    allowed = sys.stdlib_module_names | {"msgspec", NAME}
    outside = [
        (path.name, name)
        for path in (ROOT / "protocol").rglob("*.py")
        for name in imports_of(path)
        if name.split(".")[0] not in allowed
    ]
    assert not outside


def uses_torch(path: Path) -> bool:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] in ("kernels", "training") or (
        parts[0] == "models" and "/".join(parts[1:]) not in TORCH_FREE_MODELS
    )


FRONT = [path for path in FILES if not uses_torch(path)]


def test_torch_is_imported_in_kernels_and_models_only() -> None:
    outside = {
        path.relative_to(ROOT).as_posix()
        for path in FRONT
        if any(name.split(".")[0] == "torch" for name in imports_of(path))
    }
    measuring = {name for name in outside if name.startswith(BENCHMARKS_OF_THE_STEP)}
    assert outside - measuring == TORCH_INSIDE_A_FUNCTION
    for name in TORCH_INSIDE_A_FUNCTION:
        assert not any(imported.split(".")[0] == "torch" for imported in imports_at_load(ROOT / name))


def test_the_front_half_loads_without_torch() -> None:
    """Follows the imports that happen at load, through our own modules."""
    for path in FRONT:
        if path.relative_to(ROOT).parts[0] == "load_tests":
            continue
        seen, waiting = set(), [(module_of(path),)]
        while waiting:
            chain = waiting.pop()
            if chain[-1] in seen:
                continue
            seen.add(chain[-1])
            for name in imports_at_load(MODULES[chain[-1]]):
                assert name.split(".")[0] != "torch", " -> ".join((*chain, name))
                if (home := home_of(name)) is not None:
                    waiting.append((*chain, home))


def is_actor(path: Path) -> bool:
    """An actor has a receive loop that reports when it has started."""
    return any(
        isinstance(node, ast.AsyncFunctionDef)
        and node.name == "run"
        and any(argument.arg == "task_status" for argument in node.args.kwonlyargs)
        for node in ast.walk(tree_of(path))
    )


def test_actors_do_not_import_actors() -> None:
    """An actor reaches no other actor through its helpers either."""
    actors = {module_of(path) for path in FILES if path.relative_to(ROOT).parts[0] == "actors" and is_actor(path)}
    own_rooms = {room[1] for module in actors if (room := room_of(module)) is not None}
    assert {"input", "output", "scheduler", "worker", "metrics"} <= own_rooms
    for actor in sorted(actors):
        room = room_of(actor)
        assert room is not None
        if room[1] in ASSEMBLY:
            continue
        seen, waiting = set(), [(actor,)]
        while waiting:
            chain = waiting.pop()
            if chain[-1] in seen:
                continue
            seen.add(chain[-1])
            if chain[-1] != actor:
                assert chain[-1] not in actors, " -> ".join(chain)
            where = room_of(chain[-1])
            assert where is None or where[0] != "actors" or where[1] not in ASSEMBLY, " -> ".join(chain)
            homes = (home_of(name) for name in imports_of(MODULES[chain[-1]]))
            waiting.extend((*chain, home) for home in homes if home is not None and home.startswith(f"{NAME}.actors."))
