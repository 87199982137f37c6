"""Append-only access to results.csv: one row per measured number, one place that knows the columns.

And what a number or a test's outcome is of: the commit, whether it had been edited, and a hash of the kernels.
"""

from __future__ import annotations

import ast
import csv
import datetime
import functools
import hashlib
import importlib.metadata
import io
import os
import subprocess
import tokenize
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows has no such lock: there, one process at a time
    fcntl = None  # type: ignore[assignment]


COLUMNS = (
    "date,commit,gpu,torch,triton,suite,case,provider,recipe,batch,heads,kv_heads,seq_q,seq_k,head_dim,causal,"
    "includes_quantization,metric,unit,median,p20,p80,ratio_vs_cudnn,rel_l2_error"
).split(",")
SUITES = ("attention_fwd", "attention_error", "prologue", "decode", "linear", "end_to_end", "cold_start", "quality")
# What stands behind the / of a case of attention_fwd beside scalings: how it was called, what became of its softmax
CALLS = ("eager", "cuda_graph", "compiled")
SOFTMAX = ("guarded", "unguarded", "never_fixed", "all_redone")
# and which of its key tiles were visited or measured
TILES = ("skip0", "skip50", "skip75", "measuring", "measuring_all")
REQUIRED = ("suite", "case", "provider", "metric", "unit", "median")


def environment() -> dict[str, str]:
    """What the row's first columns say of this machine: date, commit, gpu ("cpu" without one), torch, triton."""
    import torch

    try:
        triton_version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton_version = ""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton_version,
    }


UNKNOWN, DIRTY = "unknown", "+dirty"
SOURCES = Path(__file__).resolve().parent


@functools.cache  # of the sources that this process has loaded, whatever is edited later
def commit(folder: Path = SOURCES) -> str:
    """Short hash of the commit that these sources are of; with "+dirty" if a Python file of the checkout was edited.

    The environment variable SAGE_COMMIT says it for a copy without a repository (on another machine). Else "unknown".
    """
    if passed := os.environ.get("SAGE_COMMIT", "").strip():
        return passed
    try:
        _git(folder, "ls-files", "--error-unmatch", Path(__file__).name)  # not a repository that merely holds a venv
        name = _git(folder, "rev-parse", "--short", "HEAD").strip()
        edited = _git(folder, "status", "--porcelain", "--", ":(top,glob)**/*.py").strip()
    except (OSError, subprocess.CalledProcessError):  # no git, no repository
        return UNKNOWN
    return name + DIRTY if edited else name


def code_of(text: str) -> str:
    """The lines of a Python file without comments, docstrings and blank lines: what its words can't change."""
    rows = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            if isinstance(body[0], ast.Expr) and isinstance(getattr(body[0].value, "value", None), str):
                for row in range(body[0].lineno - 1, body[0].end_lineno or body[0].lineno):
                    rows[row] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and rows[token.start[0] - 1]:
            rows[token.start[0] - 1] = rows[token.start[0] - 1][: token.start[1]]
    return "\n".join(row.rstrip() for row in rows if row.strip())


def kernel_sources(folder: Path = SOURCES) -> str:
    """sha256, hex, of the code of every Python file below `folder`, without its words, and of its path from there."""
    found = hashlib.sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")):
        content = code_of(path.read_text(encoding="utf-8")).encode()
        found.update(f"{len(name.encode())} {name} {len(content)} ".encode() + content)
    return found.hexdigest()


def outcome_meta(begun_with: str) -> dict:
    """What an outcome of tests says of its origin: `environment`, and

    kernel_sources: `begun_with`, the hash when the run began; or that they were edited while it ran.
    dirty: whether the commit had been edited; None where that is not known.
    """
    where = environment()
    same = kernel_sources() == begun_with
    dirty = None if where["commit"] == UNKNOWN else where["commit"].endswith(DIRTY)
    return where | {"kernel_sources": begun_with if same else "edited during the run", "dirty": dirty}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def append_row(path: str | Path, **fields) -> None:
    """Append one row; unnamed columns stay empty, the environment's columns are filled in.

    Several processes may append to one file. A write that fails (a full disk) leaves the file as it was.
    Raises: ValueError for an unknown or missing column, an unknown suite, or a file with other columns; OSError.
    """
    unknown = sorted(set(fields) - set(COLUMNS))
    missing = sorted(name for name in REQUIRED if fields.get(name) is None)
    if unknown or missing:
        raise ValueError(f"fields: got unknown {unknown} and missing {missing}, expected columns of {COLUMNS}")
    if fields["suite"] not in SUITES:
        raise ValueError(f"suite: got {fields['suite']!r}, expected one of {list(SUITES)}")
    row, path = {**environment(), **fields}, Path(path)
    with path.open("ab", buffering=0) as file:  # a buffer would be written once more when the file is closed
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed: one writes the header, and no rows mix
        size = file.seek(0, os.SEEK_END)
        check_columns(path)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
        if size == 0:
            writer.writeheader()
        writer.writerow(row)
        left = text.getvalue().encode("utf-8")
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), size)
            raise


def check_columns(path: str | Path) -> None:
    """Raise ValueError for a file that is there, not empty, and has other columns than results.csv."""
    path = Path(path)
    if path.exists() and path.stat().st_size and read_header(path) != COLUMNS:
        raise ValueError(f"{path}: got columns {read_header(path)}, expected {COLUMNS}")


def check_appendable(path: str | Path) -> None:
    """Raise ValueError unless rows can be appended to `path`: to be called before hours of work that end in them."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path: got {str(path)!r}, but folder {path.parent} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise ValueError(f"path: got {str(path)!r}, which is no regular file, expected a results.csv")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"path: got {str(path)!r}, which may not be written to; choose another one")
    check_columns(path)


def is_crossover_row(row: dict[str, str]) -> bool:
    """Whether a row is of few heads or short calls: evidence for crossover.py, too many rows for a page."""
    return row["suite"] == "attention_fwd" and "_BH" in row["case"]


def is_scaling_row(row: dict[str, str]) -> bool:
    """Whether a row is of attention as it ships and is called, for one of its scalings."""
    return row["case"].partition("/")[2] not in (*CALLS, *SOFTMAX, *TILES)


def is_without_int8(row: dict[str, str], int8_calls: str | None = None) -> bool:
    """Whether no attention call of ours ran in INT8 where a whole model was timed: its ratio is not one of ours.

    int8_calls: median of that metric in the same run. A run that did not record it was without where its output is
    stock attention's to the last digit.
    """
    if int8_calls is not None:
        return float(int8_calls) == 0
    return row["rel_l2_error"] != "" and float(row["rel_l2_error"]) == 0


def read_header(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))
