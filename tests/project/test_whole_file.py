"""Every file of ours is there whole or not at all, and nothing that was planted beside it is followed."""

from __future__ import annotations

import ast
import errno
import os
import re
import stat
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import sage_processors as sp
from sage_kernels.results import append_row, read_rows
from sage_processors.calibration import policy_files as policy
from sage_processors.files.whole_file import check_output, whole_file, write_whole
from tests.diffusion.reports.test_scale_files import learnt
from tests.support.repository import ROOT, files


def save_scales(path):
    learnt("ddpm")[1].save_scales(path)


def save_policy(path):
    policy.write_policy(path, sp.SageAttnProcessor(), [], budget={}, result={}, curve=[])


SAVERS = {
    "scales.safetensors": save_scales,
    "policy.json": save_policy,
    "any": lambda path: write_whole(path, "new"),
}


@contextmanager
def no_file_longer_than(size: int):
    """The system refuses to write more, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def victim(tmp_path_factory):
    """A file elsewhere that nobody may touch."""
    path = tmp_path_factory.mktemp("elsewhere") / "victim"
    path.write_bytes(b"precious")
    return path


@pytest.mark.parametrize("name", SAVERS)
def test_saving_replaces_in_one_step_what_a_reader_has_open(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"old")
    os.link(path, tmp_path / "another name of the old file")
    with path.open("rb") as reader:
        SAVERS[name](path)
        assert reader.read() == b"old"
    assert (tmp_path / "another name of the old file").read_bytes() == b"old" != path.read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, "another name of the old file"])


@pytest.mark.parametrize("name", SAVERS)
def test_Q30_a_planted_link_is_not_followed(name, tmp_path, victim, monkeypatch):
    """Neither at a temporary name that can be foretold, nor where the file itself goes: there the link is replaced."""
    path = tmp_path / name
    path.symlink_to(victim)
    planted = [f".{name}.{os.getpid()}.part", f"{name}.part", f"{name}.tmp", f".{name}.part"]
    for other in planted:
        (tmp_path / other).symlink_to(victim)
    SAVERS[name](path)
    assert victim.read_bytes() == b"precious"
    assert not path.is_symlink() and path.is_file() and path.read_bytes() != b"precious"
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([name, *planted])


def test_Q30_a_link_under_the_very_temporary_name_is_an_error(tmp_path, victim, monkeypatch):
    path, names = tmp_path / "file", []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (names.append(Path(source)), replace(source, target)))
    write_whole(path, b"one")
    write_whole(path, b"two")
    assert len(set(names)) == 2 and all(name.parent == tmp_path for name in names)  # another one every time
    drawn = re.fullmatch(r"\.sage-([0-9a-f]{32,})\.part", names[1].name)[1]
    monkeypatch.setattr("secrets.token_hex", lambda size: drawn)  # foretold for once
    names[1].symlink_to(victim)
    with pytest.raises(FileExistsError, match=re.escape(str(path))):
        write_whole(path, b"three")
    assert victim.read_bytes() == b"precious" and names[1].is_symlink() and path.read_bytes() == b"two"


def test_Q30_no_other_code_of_ours_opens_a_file_to_write():
    """results.csv is appended to, kernels are put into Triton's cache; everything else goes through whole_file.py."""

    def writes(node) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
            return False
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        texts = [x.value for x in (*node.args, *(k.value for k in node.keywords)) if isinstance(x, ast.Constant)]
        modes = [text for text in texts if isinstance(text, str) and re.fullmatch(r"[rwaxbt+]+", text)]
        to_write = name in ("open", "fdopen") and any(set(mode) & set("wax+") for mode in modes)
        return to_write or name in {"write_text", "write_bytes", "replace_file", "save_file", "mkstemp"}

    found = {
        str(file.relative_to(ROOT))
        for file in files("sage_processors", "kernels/sage_kernels")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if writes(node)
    }
    own = {"sage_processors/files/whole_file.py", "kernels/sage_kernels/results.py"}
    assert found == own | {"kernels/sage_kernels/_triton/compat.py"}


@pytest.mark.parametrize("name", SAVERS)
def test_Q31_a_write_that_fails_leaves_the_old_file(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"old")
    save = SAVERS[name]
    if name == "scales.safetensors":
        handle = learnt("ddpm")[1]
        save = handle.save_scales
    with no_file_longer_than(2), pytest.raises(OSError) as error:
        save(path)
    assert error.value.errno == errno.EFBIG
    assert [file.name for file in tmp_path.iterdir()] == [name] and path.read_bytes() == b"old"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_Q31_whatever_step_fails_the_old_file_stays(step, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, b"new")
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"ne")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and path.read_bytes() == b"old"


def test_Q31_file_and_folder_are_synced_before_anyone_is_told(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def watched(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append((kind, (tmp_path / "file").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    write_whole(tmp_path / "file", b"new")
    assert synced == [("file", False), ("folder", True)]


@pytest.mark.parametrize(("number", "is_raised"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_a_file_system_that_syncs_no_folders_is_none_the_worse(number, is_raised, tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "not here")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if is_raised:
        with pytest.raises(OSError, match="not here"):
            write_whole(tmp_path / "file", b"new")
    else:
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_Q32_a_read_only_folder_is_an_error_that_names_the_file(tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(b"old")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match=re.escape(str(path))):
            write_whole(path, b"new")
        with pytest.raises(ValueError, match="path: got .*nothing can be written to folder"):
            check_output(path)
        assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
        tmp_path.chmod(0o300)  # may be written to, not listed
        write_whole(path, b"new")
    finally:
        tmp_path.chmod(0o700)
    assert path.read_bytes() == b"new"


def test_pipes_devices_and_folders_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(FileExistsError, match="no regular file"):
            write_whole(tmp_path / name, b"")
        with pytest.raises(ValueError, match="output: got .*no regular file"):
            check_output(tmp_path / name, "output")
    with pytest.raises(ValueError, match="output: got .*nowhere/x.json.* does not exist; make it first"):
        check_output(tmp_path / "nowhere" / "x.json", "output")
    check_output(tmp_path / "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "pipe"]


def whole(content: bytes) -> bool:
    return len(content) == 4096 * (content[0] - ord("a") + 1) and len(set(content)) == 1


WRITE = "write_whole(path, bytes([ord('a') + number]) * 4096 * (number + 1))"


def test_Q33_processes_that_save_at_once_never_mix(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"a" * 4096)
    program = f"""
        import importlib.util, pathlib, sys
        where = {str(ROOT / "sage_processors" / "files" / "whole_file.py")!r}
        spec = importlib.util.spec_from_file_location("whole_file", where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        path, number, write_whole = pathlib.Path({str(path)!r}), int(sys.argv[1]), module.write_whole
        for _ in range(30):
            {WRITE}
        """
    command = [sys.executable, "-I", "-c", textwrap.dedent(program)]
    running = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    while any(process.poll() is None for process in running):
        assert whole(path.read_bytes())
    assert [process.returncode for process in running] == [0] * 4
    assert [file.name for file in tmp_path.iterdir()] == ["file"] and whole(path.read_bytes())


ROW = {"suite": "decode", "provider": "x", "metric": "time", "unit": "ms", "median": 1, "commit": "abc"}


def test_Q33_rows_appended_at_once_are_all_there_under_one_header(tmp_path):
    path = tmp_path / "results.csv"
    threads = [threading.Thread(target=append_row, args=(path,), kwargs=ROW | {"case": str(i)}) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(row["case"]) for row in read_rows(path)) == list(range(12))


def test_Q31_a_row_that_does_not_fit_leaves_no_half(tmp_path):
    path = tmp_path / "results.csv"
    append_row(path, **ROW, case="first")
    before = path.read_bytes()
    with no_file_longer_than(len(before) + 20), pytest.raises(OSError):
        append_row(path, **ROW, case="second")
    assert path.read_bytes() == before
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="got columns"):
        append_row(path, **ROW, case="third")
    assert path.read_text() == "a,b\n"
