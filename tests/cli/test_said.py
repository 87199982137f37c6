"""The command line to a newcomer: help at once, what ran and what did not, and sentences in place of options."""

from __future__ import annotations

import re

import pytest
import typer
from typer.testing import CliRunner

from sage_processors.cli import arguments, doctor
from sage_processors.cli import main as cli
from tests.examples.running import run
from tests.support.repository import fresh


SMALL = ["tiny_flux", "--images", "1", "--steps", "1", "--device", "cpu"]


def paths(command, *before):
    """Every command of the command line: its words."""
    commands = getattr(command, "commands", {})
    return [path for name, found in commands.items() for path in paths(found, *before, name)] or [before]


COMMANDS = paths(typer.main.get_command(cli.app))


def answered(*words) -> str:
    done = CliRunner(env={"COLUMNS": "300", "HF_HUB_OFFLINE": "1"}).invoke(cli.app, list(map(str, words)))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return " ".join(done.output.replace("│", " ").split())


def test_help_of_every_command_imports_nothing_heavy_and_is_there_at_once():
    code = f"""
        import contextlib, io, pathlib, re, time
        began = time.process_time()
        from sage_processors.cli import main as cli
        for words in {[list(path) for path in [(), *COMMANDS]]!r}:
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
                cli.app([*words, "--help"], prog_name="sage-processors")
            assert "Usage:" in said.getvalue(), words
            if not words:
                seconds = time.process_time() - began
        assert not {{"torch", "diffusers", "transformers", "triton", "sage_kernels"}} & set(sys.modules)
        print(seconds, *re.findall(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text()))
        """
    seconds, kilobytes = map(float, fresh(code).split())
    assert seconds < 1 and kilobytes < 200_000


SAID = {
    "too many steps": (["demo", "tiny_sd", "--images", "1", "--steps", "1001", "--device", "cpu"], "Error: .*1001"),
    "no end of pictures": (["calibrate", "--target-psnr", "40", "--images", "100000000"], "Error: .*--images.*10000"),
    "a forecast": (["report", "tiny_sd"], "what is swapped; nothing ran yet.*A forecast: nothing ran"),
    "a reference": (["demo", *SMALL], "No GPU: INT8 attention runs in its reference.*slower than stock"),
}


@pytest.mark.parametrize("name", SAID)
def test_commands_speak_plainly(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, expected = SAID[name]
    said = answered(*words)
    assert re.search(expected, said), said
    assert "{'" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("capability", "words"), [((9, 0), "4096 tokens or more (as measured)"), ((8, 6), "a cautious guess")]
)
def test_the_verdict_on_a_gpu_says_from_where_on_it_is_worth_it(capability, words, monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(doctor.torch.cuda, "get_device_name", lambda device=None: "A GPU")
    cuda = doctor.torch.device("cuda")
    assert words in doctor.verdict(cuda, True, [{"problem": ""}])
    assert "can't run the kernels: no such unit" in doctor.verdict(cuda, True, [{"problem": "no such unit"}])
    assert "Not fit" in doctor.verdict(cuda, False, [])
    said = "INT8 attention runs in its reference here, which shows how near it is to stock but is slower."
    assert doctor.verdict(doctor.torch.device("cpu"), True, []).endswith(said)


def test_videos_are_written_as_mp4_or_the_message_says_what_is_missing(tmp_path, monkeypatch, capsys):
    missing = not all(map(arguments.importlib.util.find_spec, ("imageio", "imageio_ffmpeg")))
    path = tmp_path / "x.mp4"
    words = ("wan", monkeypatch, "--steps", 1, "--output", path)
    if missing:
        with pytest.raises(SystemExit):
            run(*words)
        assert "pip install imageio imageio-ffmpeg" in capsys.readouterr().err
    else:
        run(*words)
        assert path.read_bytes()[4:8] == b"ftyp"
