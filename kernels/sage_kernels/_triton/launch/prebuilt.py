"""Prebuilt kernels: machine code that comes with the package and is put into Triton's disk cache.

A compile takes seconds a kernel, on every machine anew. `make prebuilt` compiles the kernels that most models need
first. Just before Triton looks into its cache for a kernel, the prebuilt one is put there, and Triton loads it as on a
second run. The key of a kernel covers everything that decides its machine code (compat.CompileRequest), so code of
other sources, options, GPUs or versions is never used. If anything fails, the kernel is compiled.
TRITON_ALWAYS_COMPILE=1 has all kernels compiled.
"""

import functools
import io
import json
import logging
import zipfile
from pathlib import Path

import triton

from .. import compat


logger = logging.getLogger("sage_kernels")
FOLDER = Path(__file__).resolve().parents[2] / "prebuilt"
CODE, METADATA = "cubin", "json"


@functools.cache
def _stored() -> tuple[zipfile.ZipFile | None, frozenset[str]]:
    """Return the archive for this Triton and the names in it: KEY.cubin and KEY.json of each kernel.

    It is read once, as many kernels are wanted at the same time.
    """
    path = FOLDER / f"triton-{triton.__version__}.zip"
    try:
        archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
        return archive, frozenset(archive.namelist())
    except FileNotFoundError:
        pass  # nothing is prebuilt for this version
    except (OSError, zipfile.BadZipFile) as error:
        logger.warning("%s can't be read, kernels are compiled: %s", path, error)
    return None, frozenset()


def offer(kernel) -> None:
    """Let compiles of this kernel find its prebuilt code from now on."""
    if _stored()[1]:
        compat.call_before_compiles(kernel, put_in_cache)


def put_in_cache(request: compat.CompileRequest) -> None:
    """Put a prebuilt kernel into Triton's cache, unless the cache has it."""
    archive, names = _stored()
    metadata = f"{request.name}.{METADATA}"
    if archive is None or f"{request.key}.{METADATA}" not in names:
        return
    try:
        known, cache = request.cached()
        if cache.get_group(metadata):
            return
        found = {kind: archive.read(f"{request.key}.{kind}") for kind in (CODE, METADATA)}
        found[METADATA] = json.dumps(json.loads(found[METADATA]) | {"hash": known}).encode()
        compat.put_group(cache, metadata, {f"{request.name}.{kind}": data for kind, data in found.items()})
    except Exception as error:  # whatever is wrong with the archive or the cache
        logger.warning("%s is compiled, although it is prebuilt: %s", request.name, error)
