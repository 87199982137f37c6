"""A rating that a later call goes on with is of the same weights and whole: otherwise it is refused or drawn again."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import sage_processors as sp
from sage_processors.evaluation.protocol import kept, rating


ASKED = [{"category": "", "prompt": f"p{i}", "seed": i} for i in range(3)]
REQUIRED = {kept.OURS: ("psnr_db",), kept.FLOOR: ("psnr_db",)}
WAYS = (kept.OURS, kept.FLOOR)


def row(number: int) -> dict:
    found = {"number": number, **ASKED[number], "calls": [1, 0, 0, 0, 0, ""]}
    return found | {"metrics": {way: {"psnr_db": 50.0} for way in WAYS}, "pictures": {"int8": f"{number}.png"}}


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").touch()
    return tmp_path


def started(folder, rows, **more):
    (folder / "rating.json").write_text(json.dumps({"settings": {"a": 1}, "rows": rows, **more}))
    return kept.started(folder, {"a": 1}, ASKED, REQUIRED)


def changed(name, value, place=()):
    """A whole rating's rows, with another value at one place of the second row."""
    rows = [row(i) for i in range(3)]
    own = rows[1]
    for key in place:
        own = own[key]
    if value is ...:
        del own[name]
    else:
        own[name] = value
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        7,
        "rows",
        [7],
        [None],
        [row(0), row(0)],
        [row(0) | {"number": 3}],
        changed("number", True),
        changed("number", -1),
        changed("seed", 0),
        changed("prompt", ["p1"]),
        changed("prompt", ...),
        changed("metrics", ...),
        changed("metrics", []),
        changed(kept.FLOOR, ..., ["metrics"]),
        changed("psnr_db", ..., ["metrics", kept.OURS]),
        changed("psnr_db", float("nan"), ["metrics", kept.OURS]),
        changed("psnr_db", float("inf"), ["metrics", kept.FLOOR]),
        changed("psnr_db", "50", ["metrics", kept.OURS]),
        changed("psnr_db", True, ["metrics", kept.OURS]),
        changed("psnr_db", 10**400, ["metrics", kept.OURS]),
        changed("lpips", 0.1, ["metrics", kept.OURS]),
        changed("lpips", 0.1, ["metrics", kept.FLOOR]),
        changed("calls", [1, 0, 0]),
        changed("calls", [1, 0, 0, -1, 0, ""]),
        changed("calls", [1, 0, 0, "1", 0, ""]),
        changed("calls", [1, 0, 0, 0, 0, 0]),
        changed("pictures", []),
        changed("int8", 7, ["pictures"]),
        changed("int8", "/etc/hostname", ["pictures"]),
        changed("int8", "../x.png", ["pictures"]),
        changed("int8", "out/x.png", ["pictures"]),
    ],
    ids=lambda rows: json.dumps(rows)[:60] if len(str(rows)) < 60 else None,
)
def test_damaged_rows_are_refused(rows, folder):
    (folder / "out").symlink_to(folder.parent)
    with pytest.raises(ValueError, match=r"rating\.json: got a file that is damaged or no rating, .* remove it"):
        started(folder, rows)


@pytest.mark.parametrize("content", ["[1]", "{}", '{"settings": 3, "rows": []}', '{"settings": {"a": 1}, "rows": 2}'])
def test_what_is_no_rating_is_refused(content, folder):
    (folder / "rating.json").write_text(content)
    with pytest.raises(ValueError, match="damaged or no rating"):
        kept.started(folder, {"a": 1}, ASKED, REQUIRED)
    with pytest.raises(ValueError, match="damaged or no rating"):
        started(folder, [], csv=[3])


def test_whole_rows_are_kept_and_those_whose_picture_is_gone_are_made_again(folder):
    rows = [row(i) for i in range(3)]
    rows[2]["metrics"][kept.OURS] |= {"lead": 1, "kv_bytes": 3}
    assert started(folder, copy.deepcopy(rows))["rows"] == rows
    (folder / "1.png").unlink()
    state = started(folder, copy.deepcopy(rows))
    assert state["rows"] == [rows[0], rows[2]]
    measured = []

    def measure(part, tick):
        measured.append(part)
        return copy.deepcopy(rows[part])

    done = rating.go_on(state, folder, 3, 1, measure, lambda rows: {"summary": len(rows)}, rating.unseen, 1)
    assert measured == [slice(1, 2)] and done["rows"] == rows and done["summary"] == 3
    assert json.loads((folder / "rating.json").read_text())["rows"] == rows


def test_another_commit_of_a_name_on_the_hub_is_another_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--some--model"
    (home / "refs").mkdir(parents=True)
    for commit, file in (("a" * 40, "config.json"), ("b" * 40, "model_index.json")):
        (home / "snapshots" / commit).mkdir(parents=True)
        (home / "snapshots" / commit / file).write_text("{}")
        (home / "refs" / "main").write_text(commit)
        assert kept.weights_of(Path("some/model")) == commit
    assert kept.weights_of(Path("other/model")) == kept.weights_of(Path("no such name/at/all")) == ""


def test_other_weights_in_the_same_folder_are_another_setting(tmp_path):
    source = sp.pipelines.path("tiny_flux")
    folder = shutil.copytree(source, tmp_path / "m")
    weights = next(folder.rglob("*.safetensors"))
    found = [kept.weights_of(folder)]
    weights.with_suffix(".txt").write_text("no weights")
    assert kept.weights_of(folder) == found[0] and kept.weights_of(tmp_path / "none") == ""
    os.utime(weights, ns=(0, 1))
    found.append(kept.weights_of(folder))
    weights.write_bytes(weights.read_bytes() + b"x")
    os.utime(weights, ns=(0, 1))
    found.append(kept.weights_of(folder))
    weights.rename(weights.with_suffix(".bin"))
    found.append(kept.weights_of(folder))
    (folder / "config.json").write_text("{}")
    found.append(kept.weights_of(folder))
    assert len(set(found)) == len(found) and all(found)
    target = torch.nn.Linear(1, 1)
    target.device, target.dtype = torch.device("cpu"), torch.float32
    settings = kept.own_settings(target, str(folder), sp.SageAttnProcessor())
    assert settings["weights"] == found[-1] and settings["torch"] == torch.__version__ and settings["kernels"]
    assert kept.own_settings(target, "tiny_flux", sp.SageAttnProcessor())["weights"] == kept.weights_of(source)
