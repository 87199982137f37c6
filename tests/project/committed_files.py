"""What every committed file has to be: `python tests/project/committed_files.py FILE ...`, a hook of pre-commit.

Text ends with one newline and has no spaces at the ends of its lines, no carriage returns and no marks of a merge.
The trained models are as their libraries write them; nothing else is larger than 2 MB.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


MAX_BYTES = 2_000_000
TRAINED = ("demo/sage_processors_demo/",)
MARKS = re.compile(r"^(<{7} |={7}$|>{7} )", re.M)


def problems(name: str, content: bytes) -> list[str]:
    """What is wrong with a file of this name, as it is written in git, and content."""
    if name.startswith(TRAINED):  # as their libraries write them
        return []
    found = []
    if len(content) > MAX_BYTES:
        found.append(f"{len(content)} bytes, more than {MAX_BYTES}")
    if b"\0" in content:
        return found
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return found
    if text and not text.endswith("\n"):
        found.append("no newline at its end")
    if text.endswith("\n\n"):
        found.append("empty lines at its end")
    if "\r" in text:
        found.append("carriage returns")
    if spaces := re.search(r"[ \t]+$", text.replace("\r", ""), re.M):
        found.append(f"spaces at the end of line {text[: spaces.start()].count(chr(10)) + 1}")
    if mark := MARKS.search(text):
        found.append(f"a mark of a merge in line {text[: mark.start()].count(chr(10)) + 1}")
    return found


def main() -> int:
    wrong = [(name, found) for name in sys.argv[1:] if (found := problems(name, Path(name).read_bytes()))]
    for name, found in wrong:
        print(f"{name}: {', '.join(found)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
