"""Row F6 of the fault table: links out of a model's folder, and files that are none. They are refused before anything
is opened; what links within the folder and in the hub's cache lead to is served.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from refusals import engine_of, refused
from tiny_model import write_tiny_model

from troupellm.models.model_folder import check_folder
from troupellm.protocol.errors import ModelLoadError

pytestmark = pytest.mark.anyio

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SETTINGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
OTHERS = (
    INDEX,
    "model-00001-of-00002.safetensors",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json",
)
"""The tiny model has none of them."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


async def serves(folder: Path) -> None:
    async with engine_of(folder) as engine:
        assert len((await engine.generate([5], max_tokens=2, ignore_eos=True)).token_ids) == 2


@pytest.mark.parametrize("place", [WEIGHTS, *SETTINGS, *OTHERS])
async def test_F6_links_out_of_the_folder_are_refused(folder, place):
    elsewhere, link = folder.parent / "elsewhere", folder / place
    elsewhere.write_bytes(link.read_bytes() if link.is_file() else b"{}")
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(elsewhere)
    assert await refused(folder) == f"{link.name} is a link out of the model's folder"


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
    """Blobs of nobody's cache."""
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
async def test_F6_whatever_a_link_leads_to_elsewhere_is_not_opened(folder, target):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(target(folder))
    with anyio.fail_after(60):
        assert (await refused(folder)).endswith("is a link out of the model's folder")


async def test_F6_a_folder_that_is_a_link_counts_by_what_is_in_it(folder):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "config.json").write_bytes(b"{}")
    (folder / "1_Pooling").symlink_to(outside, target_is_directory=True)
    assert await refused(folder) == "config.json is a link out of the model's folder"


@pytest.mark.parametrize("name", [WEIGHTS, *SETTINGS])
async def test_F6_pipes_are_refused_before_anybody_waits_for_them(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with anyio.fail_after(60):
        assert await refused(folder) == f"{name} is no regular file"


async def test_F6_links_within_the_folder_and_to_the_folder_are_followed(folder):
    (folder / "stored").mkdir()
    for name in (WEIGHTS, "config.json"):
        (folder / name).rename(folder / "stored" / name)
        (folder / name).symlink_to(Path("stored") / name)
    (folder / "README.md").symlink_to("/dev/null")  # nobody reads it
    shortcut = folder.parent / "shortcut"
    shortcut.symlink_to(folder, target_is_directory=True)
    await serves(shortcut)


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


async def test_F6_a_snapshot_of_the_hub_s_cache_may_not_lead_elsewhere_either(folder, tmp_path):
    snapshot = hub_cache(folder, tmp_path / "models--someone--tiny")
    (tmp_path / "elsewhere.json").write_text(json.dumps({}))
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../elsewhere.json")
    assert await refused(snapshot) == "config.json is a link out of the model's folder"


def test_F6_a_blob_that_is_a_link_itself_counts_by_its_end(folder, tmp_path):
    snapshot = hub_cache(folder, tmp_path / "models--someone--tiny")
    blob = (snapshot / "config.json").resolve()
    blob.unlink()
    blob.symlink_to("/etc/passwd")
    with pytest.raises(ModelLoadError, match=r"^config.json is a link out of the model's folder"):
        check_folder(snapshot)


def test_F6_links_in_a_circle_are_left_to_who_reads_them(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("other.json")
    (folder / "other.json").symlink_to("config.json")
    check_folder(folder)
