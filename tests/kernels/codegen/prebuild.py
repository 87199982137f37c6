"""Compile the kernels that come with the package, for a Hopper GPU that is not here.

    prebuild.py 3.6.0 3.7.1     an archive for each of these versions of Triton, in kernels/sage_kernels/prebuilt

A version that is not installed is downloaded for the time of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path


ROOT = Path(__file__).resolve().parents[3]
_DATE = (1980, 1, 1, 0, 0, 0)  # the same archive whenever it is made


def compiled() -> dict[str, bytes]:
    """What the archive for this process's Triton holds: {name: content}."""
    import triton

    from sage_kernels._triton import compat
    from sage_kernels._triton.launch.prebuilt import CODE, METADATA, put_in_cache
    from tests.support.usual_kernels import as_on_hopper, usual_jobs

    triton.knobs.propagate_env = False
    triton.knobs.compilation.disable_line_info = True  # they are most of a kernel's bytes
    as_on_hopper()
    found, asked = {}, []
    for job in usual_jobs().values():
        # a kernel that the archive has already is taken over: its key covers all that decides its code
        compat.call_before_compiles(job.kernel, lambda wanted: (asked.append(wanted), put_in_cache(wanted)))
        asked.clear()
        kernel = job.kernel.warmup(*job.arguments, grid=(1,), **job.constants)
        (wanted,) = asked
        metadata = json.loads(Path(kernel.metadata_group[f"{wanted.name}.{METADATA}"]).read_text())
        del metadata["hash"]  # of this build of Triton
        metadata["extern_libs"] = [[name, Path(path).name] for name, path in metadata["extern_libs"]]
        found[f"{wanted.key}.{CODE}"] = kernel.asm[CODE]
        found[f"{wanted.key}.{METADATA}"] = json.dumps(metadata).encode()
        print(f"{triton.__version__}: {job.name}, {len(kernel.asm[CODE])} bytes", flush=True)
    return found


def write(path: Path, content: dict[str, bytes]) -> None:
    """The archive; its comment is the hash of the kernels' sources."""
    from sage_kernels.results import kernel_sources

    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.comment = kernel_sources().encode()
        for name in sorted(content):
            archive.writestr(zipfile.ZipInfo(name, _DATE), content[name], zipfile.ZIP_LZMA)


def _in_a_process_of_its_own(wanted: str, folder: str) -> int:
    """`--here` with that version of Triton and an empty cache."""
    paths = [str(ROOT), str(ROOT / "kernels")]
    if version("triton") != wanted:
        place = str(Path(folder) / "triton")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
        subprocess.run([*pip, f"triton=={wanted}"], check=True)
        paths.insert(0, place)
    settings = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(Path(folder) / "cache")}
    return subprocess.run([sys.executable, __file__, "--here"], env=os.environ | settings, check=False).returncode


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="of Triton; the installed one by default")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        import triton

        from sage_kernels._triton.launch.prebuilt import FOLDER

        write(FOLDER / f"triton-{triton.__version__}.zip", compiled())
        return 0
    for wanted in options.versions or [version("triton")]:
        with tempfile.TemporaryDirectory() as folder:
            if code := _in_a_process_of_its_own(wanted, folder):
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
