"""Where the parts that are compiled lie."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def build_folder() -> Path:
    """The folder that `make setup` builds in, whether it exists or not.

    It lies beside the code. Code that has been copied elsewhere without it (the working directory of a Ray job has
    only what is under version control) uses the one beside the generated protocol code, which is not copied either.
    """
    beside = Path(__file__).resolve().parent.parent / "build"
    generated = find_spec("sluice")
    if beside.exists() or generated is None or generated.origin is None:
        return beside
    return Path(generated.origin).resolve().parents[3] / "build"
