"""Scale files that are damaged, hostile or of another format: refused before anything is read, run or written."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from sage_processors.diffusion.reports import scale_files
from tests.diffusion.reports.scale_files import Refusal, changed, flux_file, learnt, same, values_of
from tests.diffusion.test_apply_pipelines import EVERYTHING
from tests.support.tiny_pipelines import PIPES


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return flux_file(tmp_path_factory.mktemp("scales"))


@pytest.fixture(scope="module")
def refused():
    return Refusal()


# --- Q02: values, types, sizes ---


def _value(name, index, value):
    def change(tensors):
        tensor = tensors[f"transformer.{name}"].clone()
        tensor[index] = value
        return tensor

    return name, change


def _whole(name, function):
    return name, lambda tensors: function(tensors[f"transformer.{name}"])


NAN, INF = float("nan"), float("inf")
Q02 = {
    "scale_nan": (_value("plan_scale", 3, NAN), "NaN or infinity in plan_scale"),
    "scale_inf": (_value("plan_scale", 3, INF), "NaN or infinity in plan_scale"),
    "scale_zero": (_value("plan_scale", 3, 0.0), "plan_scale of 0"),
    "scale_negative": (_value("plan_scale", 3, -1.0), "a negative plan_scale"),
    "plan_nan": (_value("plan", (3, 0, 1), NAN), "NaN or infinity in plan"),
    "plan_zero": (_value("plan", (3, 2), 0.0), "or a plan without"),
    "plan_zero_of_keys": (_value("plan", (3, 1), 0.0), "or a plan without"),
    "weight_negative": (_value("plan", (3, 1, 0), -1.0), "a negative weight"),
    "table_nan": (_value("table", (15, 3, 0, 1), NAN), "NaN or infinity in table"),
    "table_negative": (_value("table", (15, 3, 0, 1), -1.0), "negative max |q| in table"),
    "table_crossed": (_value("table", (15, 3, 2, 1), 1e9), "max k below min k in table"),
    "stats_inf": (_value("stats", (3, 1, 1), INF), "NaN or infinity in stats"),
    "stats_negative": (_value("stats", (3, 0, 1), -1.0), "negative max |q| in stats"),
    "run_negative": (_value("run", (), -1), "got run -1"),
    "run_huge": (_value("run", (), 2**31 - 1), "got run 2147483647"),
    "table_run": (_value("table_run", (15, 3), 10**6), "of a run that was not"),
    "keys": (_value("keys", (3, 1), -5), "negative shape key"),
    "timestep": (_value("timestep", 1, 2.0), "got timestep"),
    "timestep_inf": (_value("timestep", 0, INF), "got timestep"),
    "timestep_negative": (_value("timestep", 0, -1.0), "got timestep"),
    "level_negative": (_value("timestep", 1, -0.1), "got timestep"),
    "timestep_nan": (_value("timestep", 0, NAN), "got timestep"),
    "dtype": (_whole("plan_scale", lambda x: x.half()), "got F16 for dtype of tensor transformer.plan_scale"),
    "dtype_of_same_size": (_whole("plan_scale", lambda x: x.int()), "got I32 for dtype"),
    "shape": (_whole("plan_scale", lambda x: x[:-1].clone()), "for shape of tensor transformer.plan_scale"),
    "rank": (_whole("plan_scale", lambda x: x[:, None].clone()), "for shape of tensor transformer.plan_scale"),
    "large": (_whole("table", lambda x: torch.cat([x] * 8)), "for shape of tensor transformer.table"),
}


@pytest.mark.parametrize("case", Q02)
def test_Q02_bad_values_types_and_shapes_are_refused(case, saved, refused, tmp_path):
    (name, change), words = Q02[case]
    message = refused(changed(saved, tmp_path / "x.safetensors", tensors={f"transformer.{name}": change(saved[2])}))
    assert words in message and "expected" in message, message
    if name in ("plan_scale", "plan", "table", "stats", "table_run", "keys") and "tensor transformer" not in message:
        assert repr(saved[1]["parts"][0]["layers"][1]["name"]) in message  # row 3 is the second head of this layer


def test_Q02_a_bad_denoiser_leaves_the_others_alone(tmp_path):
    _, handle, _ = learnt("sd_controlnet", runs=1)
    path = tmp_path / "x.safetensors"
    handle.save_scales(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    last = [name for name in tensors if name.startswith(handle._denoisers[-1].name + ".")]
    tensors[next(name for name in last if name.endswith(".plan_scale"))][0] = NAN
    save_file(tensors, path, metadata=metadata)
    pipe, _ = PIPES["sd_controlnet"]()
    with pipe.set_attn_processor(EVERYTHING) as fresh:
        before = values_of(fresh)
        with pytest.raises(ValueError, match="NaN"):
            fresh.load_scales(path)
        assert len(before) == 2 and same(before, values_of(fresh))


def test_Q02_a_huge_file_is_refused_unread(saved, refused, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(saved[0].read_bytes())
    os.truncate(path, scale_files.MAX_FILE_BYTES + 1)  # sparse: takes no room
    assert f"got a file of {2**29 + 1} bytes, expected at most {2**29}" in refused(path)
    os.truncate(path, scale_files.MAX_FILE_BYTES)  # allowed as such, but not what the header says
    assert "it is damaged" in refused(path)
    handle = learnt("ddpm", runs=1)[1]
    handle.save_scales(path)
    size = path.stat().st_size
    monkeypatch.setattr(scale_files, "MAX_FILE_BYTES", size)  # what may be written may be read
    handle.save_scales(path)
    assert handle.load_scales(path)
    monkeypatch.setattr(scale_files, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(ValueError, match=f"got scales of {size} bytes, expected at most {size - 1}"):
        handle.save_scales(path)


def test_Q42_metadata_of_the_very_limit_are_read(saved, refused, tmp_path, monkeypatch):
    text = json.dumps(saved[1])
    path = changed(saved, tmp_path / "x.safetensors", metadata=text)
    monkeypatch.setattr(scale_files, "MAX_METADATA_BYTES", len(text) - 1)
    assert f"got metadata of {len(text)} characters, expected at most {len(text) - 1}" in refused(path)
    monkeypatch.setattr(scale_files, "MAX_METADATA_BYTES", len(text))
    pipe, _ = PIPES["flux"]()
    with pipe.set_attn_processor(EVERYTHING) as fresh:
        assert fresh.load_scales(path)


@pytest.mark.parametrize(("largest", "level"), [(0.0, 0.0), (1000.0, 1.0), (3e38, 0.5)])
def test_Q42_timesteps_and_runs_at_the_ends_of_their_ranges_are_read(largest, level, saved, tmp_path):
    ends = {"timestep": [largest, level], "run": scale_files.MAX_RUN}
    tensors = {f"transformer.{n}": torch.tensor(x, dtype=saved[2][f"transformer.{n}"].dtype) for n, x in ends.items()}
    pipe, _ = PIPES["flux"]()
    with pipe.set_attn_processor(EVERYTHING) as fresh:
        assert fresh.load_scales(changed(saved, tmp_path / "x.safetensors", tensors=tensors))
        assert values_of(fresh)[0]["t"].tolist() == pytest.approx([largest, level])


@pytest.mark.parametrize("header_bytes", [0, 1, 2**22 + 1, 2**40, 2**64 - 1])
def test_Q02_a_header_of_absurd_length_is_refused_unread(header_bytes, saved, refused, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", header_bytes) + saved[0].read_bytes()[8:])
    assert f"got a header of {header_bytes} bytes" in refused(path)


def test_Q02_damaged_files_are_refused(saved, refused, tmp_path):
    path, content = tmp_path / "x.safetensors", saved[0].read_bytes()
    for damaged, words in (
        (content[:-1], "it is damaged"),
        (content + b"x", "it is damaged"),
        (content[:5], "in a file of 5,"),
        (b"", "in a file of 0,"),
        (content[:8] + b"\xff" + content[9:], "expected JSON"),
        (content[:8] + b"[" + content[9:], "expected JSON"),
    ):
        path.write_bytes(damaged)
        assert words in refused(path)
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    for offsets in ([0, 10**12], [-4, 0], [4, 0], "all"):  # safetensors itself checks these; the type is ours
        forged = copy.deepcopy(header)
        forged["transformer.run"]["data_offsets"] = offsets
        text = json.dumps(forged).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[-sum(t.nbytes for t in saved[2].values()) :])
        refused(path)


@pytest.mark.parametrize("path", [5, None, b"x.safetensors"])
def test_Q02_a_path_of_another_type(path, refused):
    assert f"path: got {type(path).__name__}, expected a str or a Path" in refused(path, TypeError)


def test_Q02_a_path_without_a_file(refused, tmp_path):
    assert "does not exist" in refused(tmp_path / "x.safetensors", FileNotFoundError)
    (tmp_path / "folder.safetensors").mkdir()
    assert "no regular file" in refused(tmp_path / "folder.safetensors")


# --- Q03: other formats ---


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def _torch_file(old):
    return lambda path, payload: torch.save(payload, path, _use_new_zipfile_serialization=not old)


def _pickle_file(protocol):
    return lambda path, payload: path.write_bytes(pickle.dumps(payload, protocol))


FORMATS = {"torch": _torch_file(False), "torch_old": _torch_file(True)}
FORMATS |= {f"pickle{protocol}": _pickle_file(protocol) for protocol in (0, 2, 5)}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".bin", ".ckpt", "", ".safetensors", ".SAFETENSORS"])
@pytest.mark.parametrize("kind", FORMATS)
def test_Q03_pickles_of_any_name_are_refused_and_never_run(kind, suffix, refused, tmp_path):
    canary, path = tmp_path / "canary", tmp_path / f"scales{suffix}"
    FORMATS[kind](path, {"plan": Canary(canary)})
    message = refused(path)
    assert "safetensors only" in message and "path: got" in message and not canary.exists()
    if kind == "pickle5":  # the canary does sing
        pickle.loads(path.read_bytes())
        assert canary.exists()


def test_Q03_a_right_file_of_another_name_and_another_name_to_save_to_are_refused(saved, refused, tmp_path):
    (tmp_path / "scales.bin").write_bytes(saved[0].read_bytes())
    assert "got 'scales.bin'" in refused(tmp_path / "scales.bin")
    with pytest.raises(ValueError, match="got 'scales.pt', expected a name that ends in .safetensors"):
        learnt("ddpm", runs=1)[1].save_scales(tmp_path / "scales.pt")
    assert not (tmp_path / "scales.pt").exists()


def test_Q03_a_header_of_128_bytes_is_no_pickle(refused, tmp_path):
    """Its length is written 0x80, the byte that pickles start with."""
    contents = (save({"x": torch.zeros(1)}, metadata={"pad": "x" * n}) for n in range(100))
    content = next(c for c in contents if c[:8] == b"\x80" + bytes(7))
    (tmp_path / "x.safetensors").write_bytes(content)
    assert "unknown keys ['pad']" in refused(tmp_path / "x.safetensors")
