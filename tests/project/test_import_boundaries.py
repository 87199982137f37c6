"""What may import what: read from the source, and tried in fresh interpreters that lack the optional packages."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest

from tests.support.repository import HUGGING_FACE, OPTIONAL, ROOT, files, fresh


@functools.cache
def imports(file: Path) -> list[tuple[str, bool]]:
    """(absolute module name, runs when the file is imported) of every import statement of a file."""
    source_root = ROOT / "kernels" if "kernels" in file.relative_to(ROOT).parts else ROOT
    package = file.relative_to(source_root).with_suffix("").parts[:-1]
    found = []

    def visit(node, at_import):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else ()
                module = ".".join((*base, *([child.module] if child.module else [])))
                found.append((module, at_import))
                found.extend((f"{module}.{alias.name}", at_import) for alias in child.names)
            visit(child, at_import and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(file.read_text(encoding="utf-8")), True)
    return found


def imported(folder_files, *names: str, only_at_import=False) -> list[str]:
    """`file: module` of every import of one of the modules or of something inside it."""
    return [
        f"{file.relative_to(ROOT)}: {module}"
        for file in folder_files
        for module, at_import in imports(file)
        if any(module == name or module.startswith(name + ".") for name in names) and (at_import or not only_at_import)
    ]


def test_kernels_know_nothing_of_hugging_face():
    above = ("sage_processors", "examples", "tests", "rich", "typer", "torchmetrics", *HUGGING_FACE)
    assert imported(files("kernels/sage_kernels"), *above) == []


def test_only_the_triton_folder_imports_triton():
    others = [f for f in files("kernels/sage_kernels", "sage_processors") if "_triton" not in f.parts]
    assert imported(others, "triton") == []


def test_the_triton_folder_is_imported_lazily_and_by_the_ops_alone():
    inside, outside = [], []
    for file in files("kernels/sage_kernels", "sage_processors"):
        (inside if "_triton" in file.parts else outside).append(file)
    assert imported(outside, "sage_kernels._triton", only_at_import=True) == []
    assert imported([f for f in outside if f.parts[-2] == "sage_processors"], "sage_kernels._triton") == []
    assert imported(files("kernels/sage_kernels/reference"), "sage_kernels._triton") == []
    assert imported(inside, "sage_kernels.reference", "sage_kernels.ops") == []


def test_processors_use_the_ops_not_their_insides():
    assert imported(files("sage_processors"), "sage_kernels.reference", "examples", "tests") == []


# What each room may import besides itself: everything below it. A folder that is not named is part of its parent.
FACTS = "sage_kernels.facts"
# versions of torch and Triton, words of messages, and nothing of ours
GROUND_FILES = {"sage_kernels.compat", "sage_kernels._triton.compat", "sage_processors.installation"}
TRITON = "sage_kernels._triton"  # its own files: what its rooms share
KERNELS = {f"{TRITON}.{name}" for name in ("prologue", "attention", "decode", "heads", "linear", "mixed")}
SHARED = {"sage_processors", *(f"sage_processors.{name}" for name in ("files", "patching", "reporting"))}
POSTPONED, LINEARS = "sage_processors.postponed", "sage_processors.linears"
DIFFUSION = "sage_processors.diffusion"
DIFFUSIONS = {f"{DIFFUSION}.{name}" for name in ("host", "steps", "heads", "graphs", "calls", "reports")} | {DIFFUSION}
LINEARS_ALL = {LINEARS, *(f"{LINEARS}.{name}" for name in ("weights", "postponed", "compiled"))}
ENTRY = "sage_processors.entry"  # a room of one file
BELOW = {
    "sage_processors.files": set(),
    "sage_processors.patching": set(),
    "sage_processors.reporting": {"sage_processors.files"},
    "sage_processors": SHARED,
    POSTPONED: SHARED,
    f"{LINEARS}.compiled": SHARED | {POSTPONED},
    f"{LINEARS}.weights": SHARED | {POSTPONED},
    f"{LINEARS}.postponed": SHARED | {POSTPONED, f"{LINEARS}.weights"},
    LINEARS: SHARED | {POSTPONED} | LINEARS_ALL,
    "sage_processors.loading": SHARED | LINEARS_ALL,
    f"{DIFFUSION}.host": SHARED | {POSTPONED},
    f"{DIFFUSION}.steps": SHARED | {f"{DIFFUSION}.host"},
    f"{DIFFUSION}.heads": SHARED | {POSTPONED} | LINEARS_ALL,
    f"{DIFFUSION}.graphs": SHARED | {POSTPONED, f"{DIFFUSION}.host"} | LINEARS_ALL,
    f"{DIFFUSION}.calls": SHARED | {POSTPONED, *(f"{DIFFUSION}.{name}" for name in ("host", "steps", "heads"))},
    f"{DIFFUSION}.reports": SHARED
    | LINEARS_ALL
    | {f"{DIFFUSION}.{name}" for name in ("host", "steps", "heads", "calls")},
    DIFFUSION: SHARED | {POSTPONED} | LINEARS_ALL | DIFFUSIONS,
    "sage_processors.language": SHARED | LINEARS_ALL,
    "sage_processors.language.generation": SHARED | LINEARS_ALL | {f"{DIFFUSION}.graphs", "sage_processors.language"},
    ENTRY: DIFFUSIONS | {"sage_processors", "sage_processors.language.generation"},
    "sage_processors.evaluation": SHARED | DIFFUSIONS | {"sage_processors.language", ENTRY},
    "sage_processors.calibration": SHARED | LINEARS_ALL | DIFFUSIONS | {"sage_processors.evaluation", ENTRY},
    "sage_processors.cli": SHARED
    | LINEARS_ALL
    | DIFFUSIONS
    | {"sage_processors.language.generation"}
    | {f"sage_processors.{name}" for name in ("language", "evaluation", "calibration", "entry")},
    "sage_kernels.planning": {"sage_kernels.ops", FACTS},
    "sage_kernels.ops": {FACTS, "sage_kernels.checks", "sage_kernels.reference", f"{TRITON}.launch", *KERNELS},
    "sage_kernels": {"sage_kernels.ops", "sage_kernels.checks", "sage_kernels.reference", FACTS},
    "sage_kernels.checks": {FACTS},
    "sage_kernels.reference": {FACTS},
    f"{TRITON}.attention": {FACTS, TRITON, f"{TRITON}.launch", f"{TRITON}.prologue"},
    f"{TRITON}.prologue": {FACTS, TRITON, f"{TRITON}.launch"},
    f"{TRITON}.decode": {FACTS, TRITON, f"{TRITON}.launch"},
    f"{TRITON}.mixed": {FACTS, TRITON, f"{TRITON}.launch", f"{TRITON}.prologue", f"{TRITON}.attention"},
    f"{TRITON}.heads": {FACTS, TRITON, f"{TRITON}.launch"},
    f"{TRITON}.linear": {FACTS, TRITON, f"{TRITON}.launch"},
    f"{TRITON}.launch": {FACTS, TRITON},
    TRITON: {FACTS},
    FACTS: set(),
}
FRONT_DOORS = {  # the package itself, and what runs it as a command, are above all rooms
    ("sage_processors", "sage_processors.diffusion.host.pipeline_method"),
    ("sage_processors", "sage_processors.diffusion.host.model_methods"),
    ("sage_processors", "sage_processors.loading.config"),
    ("sage_processors", "sage_processors.loading.register"),
    ("sage_processors.__main__", "sage_processors.cli"),
}


@functools.cache
def edges() -> dict[str, set[str]]:
    """file → files of ours that it imports, at any time; a package stands for its __init__."""
    modules = {}
    for file in files("sage_processors", "kernels/sage_kernels"):
        root = ROOT / "kernels" if "kernels" in file.relative_to(ROOT).parts else ROOT
        modules[".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = file
    graph = {}
    for name, file in modules.items():
        found = {module for module, _ in imports(file)} & set(modules)
        # `from ..room import file` is an import of the file: the package's own __init__ has nothing to give
        packages = {module for module in found if any(other.startswith(module + ".") for other in found)}
        graph[name] = found - packages - {name}
    return graph


def room(module: str) -> str:
    """The innermost folder of BELOW that a module lies in."""
    return max((name for name in BELOW if f"{module}.".startswith(f"{name}.")), key=len)


def test_arrows_between_rooms_point_down():
    wrong = [
        f"{module} imports {other}"
        for module, others in edges().items()
        for other in others
        if room(module) != room(other)
        and other not in GROUND_FILES
        and room(other) not in BELOW[room(module)]
        and module.partition(".")[0] == other.partition(".")[0]
        and (module, other) not in FRONT_DOORS
    ]
    wrong += [
        f"{module} imports {other}"
        for module, others in edges().items()
        for other in others
        if module.startswith("sage_kernels") and other.startswith("sage_processors")
    ]
    assert wrong == []


def test_no_two_rooms_import_each_other():
    """But where what is imported is the package itself, which opens lazily."""
    arrows = {(room(a), room(b)) for a, others in edges().items() for b in others if b not in GROUND_FILES}
    arrows -= {(room(a), room(b)) for a, b in FRONT_DOORS}
    assert sorted((a, b) for a, b in arrows if a < b and (b, a) in arrows) == []


def test_no_files_import_each_other_in_a_circle():
    """Late imports of functions included."""
    left = dict(edges())
    while free := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in free}
    # what is left is in a circle or above one: drop what nothing of the rest imports
    while above := set(left) - {other for others in left.values() for other in others}:
        left = {name: others for name, others in left.items() if name not in above}
    assert {name: sorted(others & set(left)) for name, others in left.items()} == {}


def test_every_room_says_what_lives_there_and_what_it_may_import():
    rooms = {file.parent for file in files("sage_processors", "kernels/sage_kernels") if file.name == "__init__.py"}
    rooms -= {ROOT / "sage_processors", ROOT / "sage_processors" / "pipelines"}
    assert {file.parent for file in files("kernels/sage_kernels")} <= rooms
    for folder in rooms:
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert text and "import" in text, folder


def test_kernels_is_a_source_root():
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's `kernels`"
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_hugging_face_kernels_wins_over_the_folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("get_kernel = 'hugging face'\n")
    code = f"import sys; sys.path.insert(2, {str(tmp_path)!r}); import kernels; print(kernels.get_kernel)"
    # the checkout comes first on the path, as in a notebook or with `python -m pytest` in it; then what is installed
    assert fresh(code, path=(ROOT, ROOT / "kernels")).strip() == "hugging face"


def test_no_module_shadows_a_dependency():
    taken = {"diffusers", "transformers", "triton", "torch", "kernels", "utils"}
    assert [
        str(f) for f in files("sage_processors", "kernels") if f.stem in taken or f.parent.name in taken - {"kernels"}
    ] == []


# what says which command installs the package that it needs
NEEDS = {
    "diffusers": "sp.apply(torch.nn.Linear(1, 1))",
    "torchmetrics": "sp.metrics.psnr(*torch.zeros(2, 1, 3, 16, 16))",
    "torchmetrics' ssim": "sp.metrics.ssim(*torch.zeros(2, 1, 3, 16, 16))",
    "transformers": "sp.register_transformers()",
    "typer": "import sage_processors.cli.main",
}


@pytest.fixture(scope="module")
def torch_alone() -> dict:
    """What a process finds in which nothing optional is installed, and its command line once typer and rich are."""
    code = f"""
        import contextlib, io, json
        import sage_processors as sp
        import sage_kernels
        import torch
        sp.SageAttnProcessor(scaling="per_block")
        q = torch.randn(1, 16, 2, 32)
        found = {{"shape": list(sage_kernels.sage_attention(q, q, q).shape)}}
        sp.metrics.sqnr_db(q, q), sp.metrics.rel_l1(q, q)
        from sage_processors.cli import doctor, self_test
        self_test.CASES = self_test.CASES[:1]
        examined = doctor.examine(torch.device("cpu"))
        found["doctor"] = [examined["passed"], examined["environment"]["torch"] is None]
        found["loaded"] = sorted(set({OPTIONAL!r}) & set(sys.modules))

        def said(code):
            try:
                exec(code)
            except ImportError as error:
                return str(error)

        found["said"] = {{name: said(code) for name, code in {NEEDS!r}.items()}}
        hidden -= {{"typer", "rich"}}
        from sage_processors import cli
        sys.argv = ["sage-processors", "demo"]
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            try:
                cli.run()
            except SystemExit as stop:
                found["demo"] = [stop.code, printed.getvalue()]
        print(json.dumps(found))
        """
    return json.loads(fresh(code, without=OPTIONAL))


@pytest.mark.slow("a process that imports transformers")
def test_a_language_model_needs_no_diffusers():
    """Install the extra `transformers` alone, and do what docs/language.md begins with."""
    pytest.importorskip("transformers")
    code = """
        import torch, transformers
        import sage_processors as sp
        shape = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
        shape |= dict(num_attention_heads=4, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
        with sp.apply(model, sp.SageAttnProcessor("fast", linears=sp.Linears("int8", min_features=1))) as handle:
            assert sp.handle_of(model) is handle
            model.generate(torch.randint(97, (1, 80)), max_new_tokens=4, do_sample=False)
            assert handle.report().calls and handle.report().linears.calls
        assert sp.handle_of(model) is None
        print(type(handle).__name__)
        """
    assert fresh(code, without=("diffusers",)).strip() == "LanguageHandle"


def test_E10_import_needs_torch_alone(torch_alone):
    assert torch_alone["shape"] == [1, 16, 2, 32] and torch_alone["loaded"] == []
    assert torch_alone["doctor"] == [True, False]


@pytest.fixture(scope="module")
def us_first() -> dict:
    """What a process finds that imports us before diffusers and transformers, with no way to another machine."""
    pytest.importorskip("diffusers")
    code = f"""
        import importlib, json, socket, torch

        def refused(*args, **kwargs):
            raise AssertionError("a socket at import")

        socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
        before = set(sys.modules)
        import sage_processors, sage_kernels
        loaded = {{m.partition(".")[0] for m in set(sys.modules) - before}} & set({OPTIONAL!r})
        for name in ("options", "cli.doctor", "evaluation.quality", "diffusion.handle", "diffusion.steps.noise_level",
                     "diffusion.calls.processors", "diffusion.reports.report", "diffusion.reports.scale_files"):
            importlib.import_module(f"sage_processors.{{name}}")
        from diffusers import DiffusionPipeline
        from transformers import AttentionInterface
        method = DiffusionPipeline.set_attn_processor.__module__
        loader = type(sys.modules["diffusers.pipelines.pipeline_utils"].__spec__.loader).__name__
        print(json.dumps([sorted(loaded), method, loader, "sage_int8" in AttentionInterface._global_mapping]))
        """
    return dict(zip(("loaded", "method", "loader", "attention"), json.loads(fresh(code)), strict=True))


@pytest.mark.slow("a process that imports diffusers and transformers")
def test_import_opens_no_socket_and_loads_nothing_optional(us_first):
    assert us_first["loaded"] == []


@pytest.mark.slow("a process that imports diffusers and transformers")
def test_importing_us_first_is_enough(us_first):
    """The pipelines' method and the attention's name are there; what waited for their modules has gone."""
    assert us_first["method"].startswith("sage_processors") and us_first["attention"]
    assert "Sage" not in us_first["loader"] and "Patching" not in us_first["loader"]


def names_the_command(name: str, said: str) -> bool:
    extra = {"transformers": "[transformers]", "typer": ""}.get(name, "[diffusers]")
    return f'pip install -e ".{extra}"' in said and name.split("'")[0] in said


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_extra_names_the_command(name, torch_alone):
    assert names_the_command(name, torch_alone["said"][name]), torch_alone["said"][name]


@pytest.mark.slow("a process for each; the quick one lacks all of them")
def test_an_extra_that_is_missing_alone_names_the_command():
    cases = [*NEEDS.items(), ("diffusers", "sp.SageFluxAttnProcessor")]
    program = f"""
        import os
        import torch
        import sage_processors as sp
        for name, code in {cases!r}:
            if os.fork() == 0:
                hidden.add(name.split("'")[0])
                try:
                    exec(code)
                except ImportError as error:
                    print(name, error, sep=": ", end="\\f", flush=True)
                os._exit(0)
            os.wait()
        """
    said = [text.partition(": ")[::2] for text in fresh(program).split("\f")[:-1]]
    assert [name for name, _ in said] == [name for name, _ in cases]
    assert all(names_the_command(name, text) for name, text in said), said


def test_the_command_line_names_the_command(torch_alone):
    code, printed = torch_alone["demo"]
    assert 'pip install -e ".[diffusers]"' in printed and code == 1
    assert "Traceback" not in printed
