"""Protects a store used by several people: maintenance by root or a colleague never locks the trainer out.

Unreadable files are a warning for commit and restore, and are never reported as damage.
"""

from __future__ import annotations

import os
import stat

import numpy as np
import pytest

import ckstore
from ckstore.cli.main import run as ckstore_command
from ckstore.errors import BackendError, UsageError
from support.other_users import COLLEAGUE, GROUP, TRAINER, as_user, need_root, place_for_all

pytestmark = pytest.mark.root


def state_of(step):
    return {"x": np.full(50_000, step, np.float32), "frozen": np.arange(70_000, dtype=np.float32)}


def commit(path, step, **how):
    with ckstore.open(path, **how) as store:
        return store.commit(state_of(step), step)


def restored(path):
    with ckstore.open(path, create=False) as store:
        return store.restore()["x"][0]


def modes_below(path):
    return {stat.S_IMODE(found.lstat().st_mode) for found in path.rglob("*")}


def owners_below(path):
    return {found.lstat().st_uid for found in path.rglob("*")}


@pytest.fixture(scope="module", autouse=True)
def imported_modules(tmp_path_factory):
    """Import what the operations need, because another user may not be able to read this Python installation."""
    need_root()
    path = tmp_path_factory.mktemp("imported_modules") / "store"
    for step in range(3):
        commit(path, step)
    with ckstore.open(path) as store:
        store.verify()
        store.tag("latest", "good")
        store.delete("seq:0")
        store.gc({"keep_last": 1}, trash_for=0)
        store.restore("good")
        store.log()
        store.repair()
        store.quarantine()
    for command in ("ls", "verify", "doctor", "repair", "gc"):
        ckstore_command([command, str(path)])


@pytest.fixture
def place():
    with place_for_all() as place:
        yield place


@pytest.fixture
def trained(place):
    """A trainer's store of four checkpoints."""
    with as_user(TRAINER):
        for step in range(4):
            commit(place / "store", step)
    return place / "store"


MAINTENANCE = {
    "gc": ["gc", "S", "--keep-last", "2"],
    "tag": ["tag", "S", "latest", "good"],
    "delete": ["delete", "S", "seq:0", "--yes"],
    "rewind": ["rewind", "S", "1"],
    "repair": ["repair", "S", "--apply"],
    "verify": ["verify", "S"],
    "set rules": ["gc", "S", "--set-policy", "--keep-last", "2"],
}


@pytest.mark.parametrize("arguments", MAINTENANCE.values(), ids=MAINTENANCE)
def test_files_of_root_belong_to_the_trainer(trained, arguments):
    code = ckstore_command([str(trained) if word == "S" else word for word in arguments])
    assert code in (0, 2)
    assert owners_below(trained) == {TRAINER}
    assert modes_below(trained) <= {0o700, 0o600, 0o400}
    with as_user(TRAINER):
        commit(trained, 20)
        assert restored(trained) == 20
        with ckstore.open(trained) as store:
            store.gc({"keep_last": 1}, trash_for=0)


def test_trainer_works_after_commit_by_root(trained):
    commit(trained, 7)
    assert owners_below(trained) == {TRAINER}
    with as_user(TRAINER):
        assert restored(trained) == 7
        commit(trained, 8)


def test_root_changes_no_owner_of_existing_files(trained, place):
    other = place / "others"
    other.mkdir(mode=0o700)
    (trained / "gc.lock").unlink(missing_ok=True)
    os.link(_file_of_root(place), trained / "gc.lock")
    with ckstore.open(trained) as store:
        store.gc()
    assert (place / "secret").stat().st_uid == 0


def _file_of_root(place):
    (place / "secret").write_bytes(b"")
    return place / "secret"


# A shared store


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_group_store_works_with_any_umask(place, umask):
    path = place / "store"
    with as_user(TRAINER, GROUP, umask=umask):
        for step in range(3):
            commit(path, step, shared="group")
    assert path.stat().st_mode & 0o2770 == 0o2770
    with as_user(COLLEAGUE, GROUP, umask=0o077):
        commit(path, 3)
        with ckstore.open(path) as store:
            store.tag("latest", "good")
            store.delete("seq:0")
            store.gc({"keep_last": 1}, trash_for=0)
            store.set_retention({"keep_last": 5})
    with as_user(TRAINER, GROUP, umask=umask):
        assert restored(path) == 3
        commit(path, 4)
        with ckstore.open(path) as store:
            store.untag("good")
            store.gc({"keep_last": 1}, trash_for=0)
    with as_user(65534), pytest.raises((BackendError, UsageError, ckstore.NotFoundError)):
        commit(path, 5)


def test_umask_store_is_readable_by_all(place):
    path = place / "store"
    with as_user(TRAINER, umask=0o022):
        commit(path, 1, shared="umask")
    with as_user(TRAINER, umask=0o077):
        commit(path, 2)
    assert modes_below(path) == {0o755, 0o644, 0o444}
    with as_user(65534):
        assert restored(path) == 2
        with pytest.raises(BackendError, match="EACCES"):
            commit(path, 3)


def test_private_store_stays_private_in_an_open_folder(place):
    path = place / "store"
    with as_user(TRAINER, umask=0):
        path.mkdir(mode=0o755)
        path.chmod(0o755)
        commit(path, 1)
    assert modes_below(path) == {0o700, 0o600, 0o400}


def test_group_writable_folder_needs_shared_store(place):
    path = place / "store"
    commit(path, 1)
    path.chmod(0o770)
    with pytest.raises(UsageError, match="other users can write"):
        commit(path, 2)
    with pytest.raises(UsageError, match="group"):
        ckstore.open(place / "other", shared="everybody")


# Unreadable files


def locked(trained, name):
    """Leave something in the store that only root may read."""
    path = trained / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in (path.parent, path.parent.parent):
        if folder not in (trained, trained.parent):
            os.chown(folder, TRAINER, TRAINER)
    if name.endswith("/"):
        path.mkdir(mode=0o700)
    else:
        path.write_bytes(b"{}")
        path.chmod(0o600)


LIST_NAME = "doomed"
UNREADABLE = ["tags/main/good", f"trash/{'a' * 32}/", f"trash/{'a' * 32}/{LIST_NAME}", "manifests/other/"]


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_file_is_a_warning(trained, name, caplog):
    locked(trained, name)
    with as_user(TRAINER):
        assert restored(trained) == 3
        with ckstore.open(trained) as store:
            store.commit(state_of(4), 4, tags=["best"])
            assert store.latest().step == 4
            assert store.restore("best")["x"][0] == 4
            store.commit(state_of(5), 5)
        assert restored(trained) == 5
    assert "EACCES" in caplog.text


def test_unreadable_list_protects_only_new_packs(trained):
    """The list can only name older packs: the commit rewrites what it would reuse, and its new packs stay."""
    locked(trained, f"trash/{'a' * 32}/{LIST_NAME}")
    with as_user(TRAINER), ckstore.open(trained) as store:
        first, second = store.commit(state_of(4), 4), store.commit(state_of(4), 5)
        assert first.chunks_reused == 0
        assert second.chunks_reused > 0


@pytest.mark.parametrize("name", ["tags/main/good", "manifests/main/{}", "packs/{}", "config.json"])
def test_unreadable_file_is_not_reported_as_damage(trained, name, capsys):
    if "{}" in name:
        path = max((trained / name.split("/")[0]).rglob("*.ckm" if "main" in name else "*.pack"))
    else:
        path = trained / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")
        os.chown(path.parent, TRAINER, TRAINER)
    os.chown(path, 0, 0)
    path.chmod(0o600)
    with as_user(TRAINER):
        codes = {command: ckstore_command([command, str(trained)]) for command in ("ls", "verify", "repair")}
    output = capsys.readouterr()
    assert "DAMAGE" not in output.out
    assert codes["verify"] == BackendError.exit_code
    assert "EACCES" in output.out + output.err
    assert codes["repair"] in (0, BackendError.exit_code)
    assert "lost" not in output.out


def test_inaccessible_folder_names_its_owner(place):
    (place / "private").mkdir(mode=0o700)
    target = place / "private" / "store"
    for path in (target, place / "private"):
        with (
            as_user(TRAINER),
            pytest.raises(BackendError, match=f"this process runs as user {TRAINER}, and {place}/private"),
        ):
            ckstore.open(path)
    with as_user(TRAINER):
        codes = [ckstore_command([command, str(target)]) for command in ("ls", "doctor", "verify", "repair")]
    assert codes == [15] * 4


def test_read_only_store_can_be_read_and_checked(place, capsys):
    path = place / "store"
    commit(path, 1, shared="umask")
    with as_user(TRAINER):
        assert ckstore_command(["doctor", str(path)]) == 0
        assert "no: this user can only read" in capsys.readouterr().out
        assert ckstore_command(["verify", str(path)]) == 0
        assert ckstore_command(["ls", str(path)]) == 0
