"""Commands try their outputs before hours of work, print what they found before they save it, and run no pickle."""

from __future__ import annotations

import ast
import errno
import json
import logging
import pickle
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import sage_processors as sp
from sage_processors.calibration import policy_files as policy
from sage_processors.calibration import search as calibration
from sage_processors.cli import loading
from sage_processors.cli import main as cli
from sage_processors.cli.checks import float32_settings_kept
from sage_processors.evaluation import language, quality
from sage_processors.files.strict_json import strict_json
from tests.support.repository import ROOT, files


SMALL = ["tiny_flux", "--images", "1", "--steps", "1", "--batch", "1", "--device", "cpu"]


def invoke(*arguments) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "300", "HF_HUB_OFFLINE": "1"}).invoke(cli.app, [str(x) for x in arguments])
    assert done.exception is None or isinstance(done.exception, (SystemExit, OSError)), done.exception
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def nothing_loads(monkeypatch):
    """No command may load anything before it has looked at its outputs."""

    def loaded(*_, **__):
        raise AssertionError("loaded before the outputs were tried")

    for name in ("load_pipeline", "load_language_skeleton"):
        monkeypatch.setattr(loading, name, loaded)
    monkeypatch.setattr(language, "load", loaded)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/where.csv", "does not exist"),
        ("folder.csv", "no regular file"),
        ("other.csv", "got columns"),
        ("/proc/x.csv", "nothing can be written to folder /proc"),  # though root may write there
    ],
)
def test_Q36_a_csv_that_takes_no_rows_is_refused_first(name, words, nothing_loads, tmp_path):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "other.csv").write_text("a,b\n")
    code, said = invoke("rate", "tiny_sd", "--csv", tmp_path / name)
    assert code == 2 and words in said and "--csv" in said, said
    assert (tmp_path / "other.csv").read_text() == "a,b\n"


def test_Q36_a_ratings_pictures_must_be_writable_too(nothing_loads, tmp_path):
    (tmp_path / "rating.json").write_text("{}")
    (tmp_path / "pictures").symlink_to("/proc")
    code, said = invoke("rate", "tiny_sd", "--output", tmp_path)
    assert code == 2 and "--output" in said and "nothing can be written to folder" in said, said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--output", "out.xyz"], "out.xyz: expected a picture's name"),
        (["demo", "--output", "out"], "out: expected a picture's name"),
        (["demo", "--output", "no/out.png"], "folder no does not exist"),
        (["demo", "--output", "folder.png"], "no regular file"),
        (["calibrate", "--target-psnr", "40", "--output", "no/p.json"], "folder no does not exist"),
        (["calibrate", "--target-psnr", "40", "--output", "p.txt"], "p.txt: expected a name that ends in .json"),
        (["calibrate", "--target-psnr", "40", "--state", "no/s.json"], "folder no does not exist"),
        (["calibrate", "--target-psnr", "40", "--output", "folder.json"], "no regular file"),
        (["demo", "--output", "/proc/x.png"], "nothing can be written to folder /proc"),
        (["calibrate", "--target-psnr", "40", "--output", "/proc/x.json"], "nothing can be written to folder /proc"),
        (["calibrate", "--target-psnr", "40", "--state", "/proc/x.json"], "nothing can be written to folder /proc"),
        (["rate", "tiny_sd", "--output", "/proc/x"], "nothing can be written to folder /proc"),
    ],
)
def test_Q36_outputs_that_cannot_be_written_are_refused_first(arguments, words, nothing_loads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("folder.png", "folder.json"):
        (tmp_path / name).mkdir()
    code, said = invoke(*arguments)
    assert code == 2 and words in said, said
    assert sorted(x.name for x in tmp_path.iterdir()) == ["folder.json", "folder.png"]


def test_Q36_calibrate_looks_at_its_files_before_it_draws(tmp_path):
    pipe = SimpleNamespace(device=torch.device("cpu"))  # draws nothing
    for name in ("path", "state_path"):
        with pytest.raises(ValueError, match=f"{name}: got .*nowhere.* does not exist"):
            sp.calibrate(pipe, ["a"], target_psnr=40, **{name: tmp_path / "nowhere" / "x.json"})


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_Q37_demo_prints_before_it_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "save_picture", full)
    code, said = invoke("demo", *SMALL[:5], "--device", "cpu", "--output", tmp_path / "x.png")
    assert code == 1 and re.search(r"PSNR [\d.]+ dB, SSIM", said) and "Picture:" not in said


def test_Q37_calibrate_prints_before_it_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "write_policy", full)
    code, said = invoke(
        "calibrate", *SMALL, "--target-psnr", "10", "--scaling", "timestep", "--output", tmp_path / "p.json"
    )
    assert (
        code == 1
        and "Budget, PSNR of 10 dB or more: met on fresh seeds: 100% of attention calls in INT8" in said
        and "Policy:" not in said
    )


def test_Q37_what_calibrate_found_is_not_lost_with_a_full_disk(tmp_path, monkeypatch, caplog):
    """A state that can't be kept does not end the search; a policy that can't be written is in the log."""
    pipe = loading.load_pipeline("tiny_flux", "cpu")
    monkeypatch.setattr(calibration.policy_files, "write_json", full)
    options = {"target_psnr": 10, "scalings": ["timestep"], "steps": 1, "progress": False}
    options |= {"config": sp.SageAttnProcessor(min_tokens=quality.MIN_TOKENS)}
    with caplog.at_level(logging.WARNING, "sage_processors"), pytest.raises(OSError, match="No space"):
        sp.calibrate(pipe, ["a red circle"], path=tmp_path / "p.json", state_path=tmp_path / "s.json", **options)
    assert "state_path: " in caplog.text and "goes on without" in caplog.text
    assert "what was found: Calibration(config=SageAttnProcessor(" in caplog.text and "met=True" in caplog.text


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_Q38_weights_that_are_pickles_are_not_loaded(part, tmp_path):
    folder = tmp_path / "pipe"
    shutil.copytree(sp.pipelines.path("tiny_flux"), folder)
    (weights,) = (folder / part).glob("*.safetensors")
    as_pickle = "pytorch_model.bin" if weights.stem == "model" else f"{weights.stem}.bin"
    from safetensors.torch import load_file

    torch.save(load_file(weights), folder / part / as_pickle)  # a sound one: what is refused is the format
    weights.unlink()
    code, said = invoke("demo", folder, "--device", "cpu", "--output", tmp_path / "x.png")
    assert code == 2 and "could not be loaded" in said and not (tmp_path / "x.png").exists()
    (folder / part / as_pickle).write_bytes(pickle.dumps(Bomb()))
    assert invoke("demo", folder, "--device", "cpu", "--output", tmp_path / "x.png")[0] == 2


def test_Q38_a_language_model_that_is_a_pickle_is_not_loaded(tmp_path):
    from safetensors.torch import load_file

    folder = tmp_path / "model"
    shutil.copytree(language.EMBEDDED, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        language.load(folder)


def test_Q38_the_package_loads_no_weights_without_saying_safetensors():
    calls = [
        (str(file.relative_to(ROOT)), ast.unparse(node))
        for file in files("sage_processors", "notebooks")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    none = ("AutoTokenizer.", "AutoConfig.", "AutoProcessor.")
    weights = [call for _, call in calls if not any(name in call for name in none)]
    assert len(weights) >= 3 and all("use_safetensors=True" in call for call in weights), calls


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("command", [["demo"], ["rate", "tiny_sd"], ["calibrate"]])
def test_Q39_commands_leave_tensorfloat32_as_it_was(before, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", before)
    seen = []

    def load(*_, **__):
        torch.backends.cudnn.allow_tf32 = False  # as for float32
        seen.append(True)
        raise OSError("that is enough")

    monkeypatch.setattr(loading, "load_pipeline", load)
    assert invoke(*command, *(["--target-psnr", "10"] if command == ["calibrate"] else []))[0] == 1
    assert seen == [True] and torch.backends.cudnn.allow_tf32 is before
    assert torch._C._get_cudnn_allow_tf32() is before  # an error where operators are left at odds with it


def test_Q39_settings_of_single_operators_are_kept_too(monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "allow_tf32", True)  # settings of each operator alone can't be put back to False
    before = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = "ieee", "tf32"
        with float32_settings_kept():
            cudnn.allow_tf32 = False
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) != ("ieee", "tf32")
        assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("ieee", "tf32")
    finally:
        cudnn.allow_tf32 = True
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before


HUGE = "1" + "0" * 400
FAR = {
    "1e400": "a float's range",
    "-1e400": "a float's range",
    HUGE: "an int64's range",
    f"-{HUGE}": "an int64's range",
}
FAR |= {str(2**63): "an int64's range", str(-(2**63) - 1): "an int64's range"}


@pytest.mark.parametrize("number", FAR, ids=lambda number: number[:6])
@pytest.mark.parametrize(
    "option", ["scaling.margin", "scaling.gamma", "keep.first_steps", "scaling.history", "min_tokens"]
)
def test_Q40_numbers_beyond_all_ranges_are_value_errors(option, number, tmp_path):
    path = tmp_path / "policy.json"
    policy.write_policy(path, sp.SageAttnProcessor(), [], budget={}, result={}, curve=[])
    content = json.loads(path.read_text())
    group, _, name = option.rpartition(".")
    (content["options"][group] if group else content["options"])[name] = "NUMBER"
    path.write_text(json.dumps(content).replace('"NUMBER"', number))
    with pytest.raises(ValueError, match=f"path: got the number .*beyond {FAR[number]}.*write it again"):
        sp.SageAttnProcessor.from_policy(path)
    if "e" not in number and number.lstrip("-") == HUGE:
        with pytest.raises(ValueError, match=f"{option}: got an int of 1329 bits, expected"):
            sp.SageAttnProcessor(**({group: {name: int(number)}} if group else {name: int(number)}))


def test_Q40_numbers_in_range_are_read_as_they_are():
    text = json.dumps({"most": 2**63 - 1, "least": -(2**63), "large": sys.float_info.max, "small": 5e-324})
    assert json.dumps(strict_json(text, "x", "y")) == text
    for number in (sys.float_info.max, -sys.float_info.max):
        assert sp.SageAttnProcessor(scaling=sp.Scaling("timestep", gamma=number)).scaling.gamma == number
    assert sp.SageAttnProcessor(min_tokens=2**63 - 1).min_tokens == 2**63 - 1
    with pytest.raises(ValueError, match="min_tokens: got 9223372036854775808, expected at least 0, and an int64"):
        sp.SageAttnProcessor(min_tokens=2**63)
    with pytest.raises(ValueError, match="margin: got inf, expected a number > 0, finite"):
        sp.SageAttnProcessor(scaling=sp.Scaling("timestep", margin=float("inf")))
    with pytest.raises(ValueError, match="margin: got nan, expected a number > 0, finite"):
        sp.SageAttnProcessor(scaling=sp.Scaling("timestep", margin=float("nan")))


def test_Q43_options_name_numbers_without_all_their_digits():
    for options in (
        {"scaling": {"margin": 10**400}},
        {"keep": {"noise": (0, 10**400)}},
        {"min_tokens": 10**400},
        {"scaling": {"history": 10**400}},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(options))}.*: got .*int of 1329 bits"):
            sp.SageAttnProcessor(**options)
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="min_tokens: got an int of 1329 bits"):
        sp.register_transformers("sage_beyond", min_tokens=10**400)


@pytest.mark.slow("draws clips")
def test_clips_are_drawn_in_the_size_that_they_were_learnt_in(tmp_path, monkeypatch):
    size = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 32}
    monkeypatch.setitem(sp.pipelines._CALL_ARGUMENTS, "tiny_wan", size)
    generate, drawn = quality.generate, []

    def watched(*args, **options):
        assert size.items() <= options.items()  # before the pipeline draws in its own size, which takes hours
        drawn.append(generate(*args, **options))
        return drawn[-1]

    monkeypatch.setattr(quality, "generate", watched)
    monkeypatch.chdir(tmp_path)
    small = ["tiny_wan", "--images", "1", "--batch", "1", "--device", "cpu", "--steps", "1"]
    code, said = invoke("calibrate", "--target-psnr", "20", "--scaling", "timestep", *small)
    assert code == 0, said
    assert drawn and all(clips.shape == (1, 9, 3, 64, 64) for clips in drawn)
