"""The build backend: setuptools, but that type checkers and editors see an editable install, too.

setuptools installs packages from two source roots by an import hook, which mypy and pyright do not run. Here an
editable install is a folder of two links, in `build/`, on the path of Python.
"""

import shutil
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


PACKAGES = {"sage_processors": "sage_processors", "sage_kernels": "kernels/sage_kernels"}


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Build the wheel of an editable install. Arguments and result: PEP 660."""
    settings = {**(config_settings or {}), "editable_mode": "strict"}  # a folder of links to single files
    name = build_meta.build_editable(wheel_directory, settings, metadata_directory)
    for folder in Path("build").glob("__editable__.*"):
        for package, home in PACKAGES.items():
            if not (folder / package).is_symlink():
                shutil.rmtree(folder / package)
                (folder / package).symlink_to(Path(home).resolve(), target_is_directory=True)  # with files yet to come
    return name
