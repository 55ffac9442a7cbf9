"""Row F6 of the fault table: links out of a model's folder, and files that are none. They are refused before anything
is opened, but only where they are about to be read. Targets of links within the folder and in the hub's cache are
served, and all other targets only if the operator says so.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from troupellm.models.hub.model_folder import check_file, check_for_tokenizers
from troupellm.models.transformers_backend.describe import hf_config
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.sleep import EMPTY, SleepWorker, WakeWorker
from troupellm.protocol.params.structured_outputs import StructuredOutputsParams
from troupellm.tests.support.checkpoints.refusals import engine_of, refused
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model
from troupellm.tests.support.engines.fixtures import SETTINGS

pytestmark = pytest.mark.anyio

WEIGHTS, INDEX, SHARD = "model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"
MODULES, POOLING = "modules.json", "of_any_name/config.json"
TEMPLATE, EXTRA_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
SETTING_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
PLACES = (WEIGHTS, *SETTING_FILES, INDEX, SHARD, TEMPLATE, EXTRA_TEMPLATE, MODULES, POOLING)
"""All files of a folder that are read."""
LEADS = {
    SHARD: (INDEX, {"weight_map": {"lm_head.weight": SHARD}}),
    POOLING: (MODULES, [{"type": "sentence_transformers.models.Pooling", "path": "of_any_name"}]),
}
"""Files that name another file, which is not looked for otherwise."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


async def serves(folder: Path, **settings: object) -> None:
    async with engine_of(folder, **settings) as engine:
        assert len((await engine.generate([5], max_tokens=2, ignore_eos=True)).token_ids) == 2


def cleared(folder: Path, place: str) -> Path:
    """A place with nothing there, which will be looked at."""
    if place in LEADS:
        name, content = LEADS[place]
        (folder / name).write_text(json.dumps(content))
    path = folder / place
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def move_away(folder: Path, *places: str) -> None:
    """Leave links to another folder behind."""
    for place in places:
        elsewhere = folder.parent / f"elsewhere-{place}"
        (folder / place).rename(elsewhere)
        (folder / place).symlink_to(elsewhere)


def outside(place: str, folder: str = "tiny") -> str:
    return f"{place} in the folder {folder} is a link out of it"


@pytest.mark.parametrize("place", PLACES)
async def test_F6_links_out_of_the_folder_are_refused(folder, place):
    elsewhere, link = folder.parent / "elsewhere", folder / place
    elsewhere.write_bytes(link.read_bytes() if link.is_file() else b"{}")
    cleared(folder, place).symlink_to(elsewhere)
    assert await refused(folder) == outside(place)


@pytest.mark.parametrize("place", PLACES)
async def test_F6_pipes_are_refused_before_anybody_waits_for_them(folder, place):
    os.mkfifo(cleared(folder, place))
    with anyio.fail_after(60):
        assert await refused(folder) == f"{place} in the folder tiny is no regular file"


async def test_F6_links_that_nobody_follows_are_nobody_s_business(folder):
    elsewhere = folder.parent / "elsewhere"
    elsewhere.write_bytes(b"x")
    for name in ("LICENSE.txt", "eval_results.json", "consolidated.safetensors", SHARD, "tokenizer.model", "any.gguf"):
        (folder / name).symlink_to(elsewhere)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").symlink_to(elsewhere)  # which no modules.json names
    (folder / "latest.json").symlink_to(folder.parent / "nobody")
    os.mkfifo(folder / "notes.txt")
    with anyio.fail_after(60):
        await serves(folder)


async def test_F6_random_weights_need_no_files(folder):
    cleared(folder, WEIGHTS).symlink_to(folder.parent / "nobody")
    (folder / INDEX).symlink_to(folder.parent / "nobody")
    await serves(folder, load_format="dummy")


async def test_F6_of_a_tokenizer_elsewhere_only_that_is_read(folder):
    tokens = write_tiny_model(folder.parent / "tokens")
    cleared(tokens, WEIGHTS).symlink_to(folder.parent / "nobody")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        cleared(folder, name).symlink_to(folder.parent / "nobody")
    await serves(folder, tokenizer=str(tokens))
    move_away(tokens, "tokenizer.json")
    assert await refused(folder, tokenizer=str(tokens)) == outside("tokenizer.json", "tokens")
    await serves(folder, tokenizer=str(tokens), allow_model_links=True)


async def test_F6_a_drafter_s_folder_is_no_other_than_a_model_s(folder):
    drafter = write_tiny_model(folder.parent / "drafter")
    move_away(drafter, WEIGHTS)
    wanted = {"model": str(drafter), "num_speculative_tokens": 2}
    assert await refused(folder, speculative_config=wanted) == outside(WEIGHTS, "drafter")


async def test_F6_the_operator_may_have_links_followed(folder):
    """By the processes that compile guides, too."""
    move_away(folder, WEIGHTS, *SETTING_FILES)
    await serves(folder, allow_model_links=True)
    guide = StructuredOutputsParams(regex="[ab]{3}").spec()
    async with engine_of(folder, allow_model_links=True) as engine:
        assert re.fullmatch("[ab]{3}", (await engine.generate([5], guide=guide, max_tokens=10)).text)


async def test_F6_pipes_are_refused_where_links_are_followed_too(folder):
    os.mkfifo(folder.parent / "pipe")
    cleared(folder, "config.json").symlink_to(folder.parent / "pipe")
    with anyio.fail_after(60):
        wrong = await refused(folder, allow_model_links=True)
    assert wrong == "config.json in the folder tiny is no regular file"


def test_F6_a_worker_looks_again_whenever_it_reads(folder):
    """One that replaces another is given a folder that was looked at long ago, and so is one that wakes."""
    settings = SETTINGS | {"model": str(folder)}
    worker = ModelWorker(folder)
    worker.load(EngineConfig.from_flat(settings), lambda _: None)
    worker.command(SleepWorker(level=EMPTY), lambda _: None)
    move_away(folder, WEIGHTS)
    with pytest.raises(ModelLoadError, match=f"^{outside(WEIGHTS)}"):
        worker.command(WakeWorker(), lambda _: None)
    worker.close()
    another = ModelWorker(folder)
    with pytest.raises(ModelLoadError, match=f"^{outside(WEIGHTS)}"):
        another.load(EngineConfig.from_flat(settings), lambda _: None)
    another.close()
    another.load(EngineConfig.from_flat(settings | {"allow_model_links": True}), lambda _: None)
    another.close()


def pipe(folder: Path) -> Path:
    os.mkfifo(folder.parent / "pipe")
    return folder.parent / "pipe"


def another(folder: Path) -> Path:
    """A link to a link."""
    (folder / "first.json").symlink_to("/etc/passwd")
    return Path("first.json")


def sibling(folder: Path) -> Path:
    """Its name begins as the folder's does."""
    (folder.parent / "tiny-2").mkdir()
    (folder.parent / "tiny-2" / "config.json").write_bytes(b"{}")
    return Path("../tiny-2/config.json")


def not_the_hub(folder: Path) -> Path:
    """A folder of blobs that is no cache."""
    (folder.parent / "blobs").mkdir()
    (folder.parent / "blobs" / "config").write_bytes(b"{}")
    return folder.parent / "blobs" / "config"


TARGETS: dict[str, Callable[[Path], Path]] = {
    "device": lambda folder: Path("/dev/zero"),
    "pipe": pipe,
    "nothing": lambda folder: folder.parent / "nobody",
    "above": lambda folder: Path("../../../../../../../../../../etc/passwd"),
    "another link": another,
    "sibling": sibling,
    "blobs": not_the_hub,
}


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
async def test_F6_targets_of_links_that_lead_elsewhere_are_not_opened(folder, target):
    cleared(folder, "config.json").symlink_to(target(folder))
    with anyio.fail_after(60):
        assert await refused(folder) == outside("config.json")


@pytest.mark.parametrize("place", [EXTRA_TEMPLATE, POOLING])
async def test_F6_a_folder_that_is_a_link_counts_by_what_is_in_it(folder, place):
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    path = cleared(folder, place)
    (elsewhere / path.name).write_bytes(b"{}")
    path.parent.rmdir()
    path.parent.symlink_to(elsewhere, target_is_directory=True)
    assert await refused(folder) == outside(place)


async def test_F6_links_within_the_folder_and_to_the_folder_are_followed(folder):
    (folder / "stored").mkdir()
    for name in (WEIGHTS, "config.json"):
        (folder / name).rename(folder / "stored" / name)
        (folder / name).symlink_to(Path("stored") / name)
    pooling = cleared(folder, POOLING)
    (folder / "stored" / "pooling.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    pooling.symlink_to("../stored/pooling.json")
    shortcut = folder.parent / "shortcut"
    shortcut.symlink_to(folder, target_is_directory=True)
    await serves(shortcut)


def test_F6_errors_tell_which_folder_and_what_to_do(folder, monkeypatch):
    move_away(folder, "config.json")
    monkeypatch.chdir(folder)
    with pytest.raises(ModelLoadError) as caught:
        check_file(Path() / "config.json")
    assert caught.value.message == outside("config.json")
    assert "--allow-model-links" in caught.value.hint


async def test_F6_gguf_files_of_a_folder_lie_in_it(folder):
    elsewhere, home = folder.parent / "elsewhere", folder.parent / "files"
    elsewhere.write_bytes(b"")
    home.mkdir()
    (home / "model.gguf").symlink_to(elsewhere)
    assert await refused(home) == outside("model.gguf", "files")
    assert (await refused(home / "model.gguf")).endswith("is no GGUF file"), "who names the link itself means the file"
    (home / "model.gguf").unlink()
    os.mkfifo(home / "model.gguf")
    with anyio.fail_after(60):
        assert await refused(home) == "model.gguf in the folder files is no regular file"


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "spiece.model", "special_tokens_map.json"])
def test_F6_a_library_that_makes_a_tokenizer_of_other_files_is_not_led_elsewhere(folder, name):
    for other in ("LICENSE.txt", WEIGHTS):
        cleared(folder, other).symlink_to(folder.parent / "nobody")
    check_for_tokenizers(folder)
    (folder / name).symlink_to(folder.parent / "nobody")
    with pytest.raises(ModelLoadError, match=f"^{outside(name)}"):
        check_for_tokenizers(folder)


def test_F6_settings_for_some_versions_of_a_library_are_not_elsewhere(folder):
    (folder / "config.4.0.0.json").symlink_to("/etc/passwd")
    with pytest.raises(ModelLoadError, match=f"^{outside('config.4.0.0.json')}"):
        hf_config(folder)


def hub_cache(folder: Path, cache: Path) -> Path:
    """The same model as the hub's library keeps it; the folder of its one snapshot."""
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in folder.iterdir():
        blob = cache / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


async def test_F6_the_hub_s_cache_and_links_into_it_are_followed(folder, tmp_path):
    snapshot = hub_cache(folder, tmp_path / "models--someone--tiny")
    await serves(snapshot)
    copy = tmp_path / "copy"  # as older versions of the library filled a folder of one's own
    copy.mkdir()
    for link in snapshot.iterdir():
        (copy / link.name).symlink_to(link.resolve())
    await serves(copy)


async def test_F6_blobs_that_repositories_of_a_cache_share_are_followed(folder, tmp_path):
    """As the hub's library keeps large files since its second version: one link more."""
    store = tmp_path / "blobs"
    snapshot = hub_cache(folder, tmp_path / "models--someone--tiny")
    for link in list(snapshot.iterdir()):
        blob = link.resolve()
        shared = store / blob.name[:2] / blob.name
        shared.parent.mkdir(parents=True, exist_ok=True)
        blob.rename(shared)
        blob.symlink_to(shared)
    with pytest.raises(ModelLoadError, match="is a link out of it"):
        check_file(snapshot / WEIGHTS)
    (store / ".huggingface-shared-blobs").write_text("1")
    await serves(snapshot)
    (store / "passwords").write_text("{}")
    (snapshot / "generation_config.json").unlink(missing_ok=True)
    (snapshot / "generation_config.json").symlink_to(store / "passwords")
    assert await refused(snapshot) == outside("generation_config.json", snapshot.name)


def test_F6_a_subfolder_of_a_snapshot_is_one_of_the_hub_s_cache(folder, tmp_path):
    snapshot = hub_cache(folder, tmp_path / "someone")
    inner = snapshot / "variant"
    inner.mkdir()
    (inner / "config.json").symlink_to((snapshot / "config.json").resolve())
    check_file(inner / "config.json")


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "BertTokenizer", "vocab": "/etc/passwd"}, "vocab names a file"),
        ("special_tokens_map.json", {"vocab_file": "/etc/passwd"}, "vocab_file names a file"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["a/tokenizer.4.0.0.json"]}, "fast_tokenizer_files must be"),
    ],
)
async def test_F6_settings_that_name_files_for_the_library_are_refused(folder, file, settings, said):
    (folder / "tokenizer.json").unlink()
    (folder / file).unlink(missing_ok=True)
    (folder / file).write_text(json.dumps(settings))
    message = await refused(folder)
    assert message.startswith(f"{file}: {said}")


async def test_F6_blobs_may_be_on_another_disk_but_other_files_there_are_none(folder, tmp_path):
    cache, disk = tmp_path / "models--someone--tiny", tmp_path / "disk"
    snapshot = hub_cache(folder, cache)
    (cache / "blobs").rename(disk)
    (cache / "blobs").symlink_to(disk, target_is_directory=True)
    await serves(snapshot)
    (disk / "passwd").write_bytes((snapshot / "config.json").read_bytes())
    cleared(snapshot, "config.json").symlink_to("../../blobs/passwd")
    assert await refused(snapshot) == outside("config.json", snapshot.name)


async def test_F6_a_snapshot_of_the_hub_s_cache_may_not_lead_elsewhere_either(folder, tmp_path):
    snapshot = hub_cache(folder, tmp_path / "models--someone--tiny")
    (tmp_path / "elsewhere.json").write_text(json.dumps({}))
    cleared(snapshot, "config.json").symlink_to("../../../elsewhere.json")
    assert await refused(snapshot) == outside("config.json", snapshot.name)


def test_F6_a_blob_that_is_a_link_itself_counts_by_its_end(folder, tmp_path):
    snapshot = hub_cache(folder, tmp_path / "models--someone--tiny")
    blob = (snapshot / "config.json").resolve()
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    with pytest.raises(ModelLoadError, match=f"^{outside('config.json', snapshot.name)}"):
        check_file(snapshot / "config.json")


def test_F6_links_in_a_circle_are_left_to_who_reads_them(folder):
    cleared(folder, "config.json").symlink_to("other.json")
    (folder / "other.json").symlink_to("config.json")
    check_file(folder / "config.json")
