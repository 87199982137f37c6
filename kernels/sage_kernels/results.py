"""Access to results.csv, one row per measured number, and the origin of numbers and test outcomes.

Rows are only appended. The origin is the commit, whether it had been edited, and a hash of the kernels.
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
except ImportError:  # Windows has no such lock: there, only one process may append
    fcntl = None  # type: ignore[assignment]


COLUMNS = (
    "date,commit,gpu,torch,triton,suite,case,provider,recipe,batch,heads,kv_heads,seq_q,seq_k,head_dim,causal,"
    "includes_quantization,metric,unit,median,p20,p80,ratio_vs_cudnn,rel_l2_error"
).split(",")
SUITES = (
    "real_language",
    *("attention_fwd", "attention_error", "prologue", "decode", "linear", "end_to_end", "cold_start", "quality"),
    *("generate", "models", "parallel", "picture", "clip", "linear_few_rows"),
)
# Behind the / of a case of attention_fwd, apart from scalings: how it was called, a variant of its softmax,
CALLS = ("eager", "cuda_graph", "compiled")
SOFTMAX = ("guarded", "unguarded", "never_fixed", "all_redone")
# the key tiles that were visited or measured, and inputs that move as from step to step
TILES = ("skip0", "skip50", "skip75", "measuring", "measuring_all")
DRIFT = "drift"
REQUIRED = ("suite", "case", "provider", "metric", "unit", "median")


def environment() -> dict[str, str]:
    """Return a row's columns for this machine: date, commit, gpu ("cpu" without one), torch, triton."""
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


@functools.cache  # the sources that this process has loaded, whatever is edited later
def commit(folder: Path = SOURCES) -> str:
    """Return the short hash of these sources' commit, with "+dirty" if a Python file was edited.

    For a copy without a repository (on another machine) the environment variable SAGE_COMMIT gives it; else "unknown".
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


@functools.lru_cache(maxsize=512)
def code_of(text: str) -> str:
    """Return the code lines of a Python file, without comments, docstrings and blank lines."""
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
    """Return the sha256, hex, of all Python files below `folder`: their paths, and their code lines."""
    found = hashlib.sha256()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")):
        content = code_of(path.read_text(encoding="utf-8")).encode()
        found.update(f"{len(name.encode())} {name} {len(content)} ".encode() + content)
    return found.hexdigest()


def outcome_meta(begun_with: str) -> dict:
    """Return `environment`, and more about the origin of test outcomes.

    kernel_sources: `begun_with`, the hash when the run began; or a note that they were edited while it ran.
    dirty: True if the commit had been edited; None where that is not known.
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
    with path.open("ab", buffering=0) as file:  # unbuffered: after an error a buffer would be written again on close
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # until close: one writes the header, and rows do not mix
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
    """Raise ValueError if the file exists, is not empty, and has other columns than results.csv."""
    path = Path(path)
    if path.exists() and path.stat().st_size and read_header(path) != COLUMNS:
        raise ValueError(f"{path}: got columns {read_header(path)}, expected {COLUMNS}")


def check_appendable(path: str | Path) -> None:
    """Raise ValueError unless rows can be appended to `path`. Call it before hours of measuring."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"path: got {str(path)!r}, but folder {path.parent} does not exist; make it first")
    if path.exists() and not path.is_file():
        raise ValueError(f"path: got {str(path)!r}, which is no regular file, expected a results.csv")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"path: got {str(path)!r}, which may not be written to; choose another one")
    check_columns(path)


def is_crossover_row(row: dict[str, str]) -> bool:
    """Return True for a row of few heads or short calls: evidence for crossover.py, too many for a page."""
    return row["suite"] == "attention_fwd" and "_BH" in row["case"]


def is_scaling_row(row: dict[str, str]) -> bool:
    """Return True for a row of one of attention's scalings, with the usual call, kernels and inputs."""
    return row["case"].partition("/")[2] not in (*CALLS, *SOFTMAX, *TILES, DRIFT)


def is_without_int8(row: dict[str, str], int8_calls: str | None = None) -> bool:
    """Return True if a model was timed without any INT8 attention call: the ratio is not INT8's.

    int8_calls: median of that metric in the same run. In a run that did not record it, no call ran in INT8 if the
    output is stock attention's to the last digit.
    """
    if int8_calls is not None:
        return float(int8_calls) == 0
    return row["rel_l2_error"] != "" and float(row["rel_l2_error"]) == 0


def read_header(path: Path) -> list[str]:
    """Return the column names of a CSV file."""
    with path.open(newline="") as file:
        return next(csv.reader(file))


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file as dicts."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))
