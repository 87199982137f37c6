"""Every code block of the documentation runs: Python offline on small models, commands at least by name and option."""

from __future__ import annotations

import ast
import re
import shlex

import pytest
import torch
from typer.testing import CliRunner

import sage_kernels
from sage_processors.cli import main as cli
from sage_processors.language.generation import paged_cache
from tests.docs.blocks import PAGES, blocks
from tests.docs.stand_ins import stand_in
from tests.support.repository import ROOT


LANGUAGES = {"python", "sh", "yaml", "toml", ""}
CHEAP = ("report tiny_flux", "report tiny_sd")  # commands that are run; others are looked up


def names(found, *, slow=()):
    """Parameters named by page and line; those of the pages `slow` are left to `make test-all`."""
    run_for_long = pytest.mark.slow("examples of all pages take minutes")
    return [pytest.param(block, id=block.name, marks=run_for_long if block.page in slow else ()) for block in found]


PYTHON = blocks("python")
BUT_README = {block.page for block in PYTHON} - {"README.md"}


@pytest.mark.parametrize("block", names(PYTHON, slow=BUT_README))
def test_python_blocks_run_as_they_are(block, monkeypatch, tmp_path, capsys):
    stand_in(monkeypatch)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    calls = count_calls(monkeypatch)
    code = compile("\n" * block.line + block.text, str(ROOT / block.page), "exec")
    exec(code, {"__name__": "__main__"})
    if any(word in block.text for word in ("SageAttnProcessor", "sage_int8", "sage_attention")):
        is_traced = "compile_" in block.text or "torch.export" in block.text  # graphs are not counted here
        assert calls or is_traced, "nothing ran in INT8"


def count_calls(monkeypatch) -> list[str]:
    """Names of the ops that are called eagerly from now on."""
    calls: list[str] = []

    def counted(name, op):
        def call(*args, **kwargs):
            if not torch.compiler.is_compiling():
                calls.append(name)
            return op(*args, **kwargs)

        return call

    for name in ("sage_attention", "sage_decode_attention", "differentiable_attention", "mixed_attention"):
        monkeypatch.setattr(sage_kernels, name, counted(name, getattr(sage_kernels, name)))
    for name in ("sage_attention_varlen", "paged_attention"):
        monkeypatch.setattr(paged_cache, name, counted(name, getattr(paged_cache, name)))
    return calls


@pytest.mark.parametrize("block", names(blocks("python")))
def test_python_blocks_are_complete(block):
    """Nothing is left to the reader: what a block uses, it has imported or made."""
    tree = ast.parse(block.text)
    imported = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imported and "..." not in block.text


def test_pages_have_blocks_of_known_languages_only():
    assert len(blocks("python")) >= 15 and len(blocks("sh")) >= 5
    everything = [block for language in ("bash", "shell", "console", "py", "pycon") for block in blocks(language)]
    assert not everything, f"write sh or python: {[block.name for block in everything]}"


def commands() -> list:
    """(page:line, words) of every command of a shell block or of a `sage-processors` in running text."""
    found = []
    for block in blocks("sh"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.append(pytest.param(words, id=f"{block.name} {' '.join(words)}"))
    return found


def inline_commands() -> list:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for command in sorted(set(re.findall(r"`((?:sage-processors|make) [^`\n]+)`", text))):
            if "|" not in command and "…" not in command:
                found.append(pytest.param(shlex.split(command), id=f"{page} {command}"))
    return found


@pytest.mark.parametrize("words", [*commands(), *inline_commands()])
def test_commands_exist(words):
    while "=" in words[0]:  # variables before a command
        words = words[1:]
    program, *rest = words
    check = {"sage-processors": check_our_command, "make": check_target, "pip": check_extras, "python": check_script}
    assert program in check, f"{program}: nothing checks this command; add it here or leave it out"
    check[program](rest)


def check_our_command(words):
    if " ".join(words) in CHEAP:
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
        return
    names = [word for word in words if not word.startswith("-")]
    import typer

    assert words
    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands") and names:
        assert names and names[0] in command.commands, f"no command {names[:1]}: {sorted(command.commands)}"
        command = command.commands[names.pop(0)]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    options |= {"--help"}
    assert {word.split("=")[0] for word in words if word.startswith("-")} <= options


def check_target(words):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        if "=" not in word:
            assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"no target {word}"


def check_extras(words):
    assert words[0] == "install"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extras in re.findall(r"\[([\w,]+)\]", " ".join(words)):
        assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))


def check_script(words):
    if words[:2] == ["-m", "sage_processors"]:
        check_our_command(words[2:])
        return
    script = ROOT / words[0]
    assert script.is_file(), f"{script} does not exist"
    source = script.read_text(encoding="utf-8")
    assert all(f'"{word}"' in source for word in words[1:] if word.startswith("--") and word != "--help")
