"""Execute the notebooks: .py files (jupytext, percent format) become .ipynb files with outputs.

    python notebooks/run.py                                   # all, full size: writes *.ipynb and figures/*.png
    python notebooks/run.py quality_budget                    # one of them
    python notebooks/run.py --size small --out some_folder    # what CI does: nothing in notebooks/ is touched

The size is the only parameter. It is set in a cell inserted after the cell tagged "parameters".
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path


HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TIMEOUT = 1800  # seconds a cell may take


# {notebook: an embedded pipeline that it needs, with weights that may be missing}
NEEDS = {"video": "tiny_wan"}


def sources() -> list[Path]:
    """Return the notebooks, which are the Python files with jupytext's header."""
    return sorted(path for path in HERE.glob("*.py") if path.read_text(encoding="utf-8").startswith("# ---\n"))


def missing(name: str) -> str | None:
    """Return the embedded pipeline that a notebook lacks weights of, or None if it can run."""
    from sage_processors import pipelines

    needed = NEEDS.get(name)
    return None if needed is None or needed in pipelines.video_names() else needed


def read(source: Path):
    """Read a source as a notebook without outputs. Cell ids are numbers, so equal texts give equal files."""
    import jupytext

    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return notebook


def with_parameters(notebook, **values):
    """Insert a cell that sets `values` after the cell tagged "parameters", and return the notebook."""
    import nbformat

    place = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    lines = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(lines, id="parameters-of-this-run"))
    return notebook


def execute(notebook, *, timeout: int = TIMEOUT):
    """Run all cells in a new kernel in this folder, with this checkout's packages.

    Raises: CellExecutionError.
    """
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "IPYTHONDIR": folder,  # without the user's start-up files and history
        }
        client = NotebookClient(notebook, timeout=timeout, resources={"metadata": {"path": str(HERE)}})
        client.execute(env=environment)
    return tidy(notebook)


def tidy(notebook):
    """Remove times and stderr (progress bars, warnings) from a notebook, and return it."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            noise = [output for output in cell.outputs if output.get("name") == "stderr"]
            cell.outputs = [output for output in cell.outputs if output not in noise]
            sys.stderr.write("".join(output.text for output in noise))
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [path.stem for path in sources()]
    parser.add_argument("notebook", nargs="*", choices=[*names, []], help="default: all")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the .ipynb, and figures/ in it")
    arguments = parser.parse_args()
    import nbformat

    (arguments.out / "figures").mkdir(parents=True, exist_ok=True)
    for path in sources():
        if arguments.notebook and path.stem not in arguments.notebook:
            continue
        if needed := missing(path.stem):
            print(f"{path.stem}: left out, {needed} has no weights here", flush=True)
            continue
        start = time.monotonic()
        notebook = read(path)
        if arguments.size != "full" or arguments.out.resolve() != HERE:
            figures = str((arguments.out / "figures").resolve())
            notebook = with_parameters(notebook, SIZE=arguments.size, FIGURES=figures)
        nbformat.write(execute(notebook), arguments.out / f"{path.stem}.ipynb")
        print(f"{path.stem}: {time.monotonic() - start:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
