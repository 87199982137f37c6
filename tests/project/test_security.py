"""What SECURITY.md promises of our sources: no way to run what a file or a repository says, no network at import."""

from __future__ import annotations

import ast

import pytest

from tests.support.repository import ROOT, files


CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
ATTRIBUTES = {("torch", "load"), ("torch", "jit"), ("torch", "hub"), ("torch", "package"), ("os", "system")}
OPTIONS = {"trust_remote_code", "allow_pickle", "weights_only", "shell"}
# `file: what`, each with why it is harmless
ALLOWED: dict[str, str] = {
    "kernels/sage_kernels/_triton/compat.py: compile": "a local name of Triton's compiler, which gets our own kernels",
    "sage_processors/evaluation/metrics.py: torch.hub": "asks which folder its checkpoints are in",
    "kernels/sage_kernels/compat.py: torch.jit": "asks whether a trace is being made",
    "sage_processors/language/masks.py: torch.jit": "asks whether a trace is being made",
}


def dangers(source: str) -> list[str]:
    """Names in the code (not in comments and docstrings) of a Python file that can run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            found.append(node.func.id)
        elif isinstance(node, ast.Name) and node.id in OPTIONS | MODULES:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ATTRIBUTES or (node.value.id == "builtins" and node.attr in CALLS):
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            home = node.module.partition(".")[0]
            found += [home] if home in MODULES else []
            found += [f"{home}.{alias.name}" for alias in node.names if (home, alias.name) in ATTRIBUTES]
        elif isinstance(node, ast.keyword) and node.arg in OPTIONS:
            says_no = isinstance(node.value, ast.Constant) and node.value.value is False
            found += [] if says_no and node.arg == "trust_remote_code" else [node.arg]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OPTIONS | MODULES:
            found.append(node.value)
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nx = torch.load(p)", ["torch.load"]),
        ("from torch import load", ["torch.load"]),
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("importlib.import_module('pickle')", ["pickle"]),
        ("eval(x)", ["eval"]),
        ("exec(x)", ["exec"]),
        ("exec(compile(x, '', 'exec'))", ["exec", "compile"]),
        ("builtins.eval", ["builtins.eval"]),
        ("f(trust_remote_code=True)", ["trust_remote_code"]),
        ("f(**{'trust_remote_code': 1})", ["trust_remote_code"]),
        ("np.load(p, allow_pickle=True)", ["allow_pickle"]),
        ("run('ls', shell=True)", ["shell"]),
        ("f(trust_remote_code=None)", ["trust_remote_code"]),  # transformers would ask the user
        # harmless: a method, a docstring, a comment
        ("model.eval()\n'''never torch.load or pickle'''  # eval(x)", []),
        ("re.compile(x); torch.compile(x)", []),
        ("f(trust_remote_code=False)", []),
    ],
)
def test_dangers_are_found(source, found):
    assert dangers(source) == found


def test_our_sources_run_nothing_that_a_file_says():
    found = {
        f"{file.relative_to(ROOT)}: {danger}"
        for file in files("sage_processors", "kernels")
        for danger in dangers(file.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)


def test_words_that_must_not_be_in_our_sources_at_all():
    """Also not in strings and comments: nobody should have to wonder."""
    words = ("torch.load", "pickle.load", "trust_remote_code=True", "weights_only=False")
    text = {file: file.read_text(encoding="utf-8") for file in files("sage_processors", "kernels")}
    assert [(file.name, word) for file, source in text.items() for word in words if word in source] == []


def test_security_policy_says_how_to_report():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a vulnerability" in text and "Supported versions" in text and "TRITON_CACHE_DIR" in text
