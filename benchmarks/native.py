"""Baselines written in C or C++, compiled on the spot into build/bench."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent.parent / "build" / "bench"


def compiled(source: Path) -> Path:
    """The shared library of one file, compiled anew if the file is younger. Raises RuntimeError without a compiler."""
    library = _FOLDER / f"lib{source.stem}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        compiler = shutil.which("c++" if source.suffix == ".cpp" else "cc")
        if compiler is None:
            raise RuntimeError(f"no C or C++ compiler on PATH; the baseline {source.name} is compiled on the spot")
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = ["-O3", "-shared", "-fPIC"]  # those of the operators
        subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True, timeout=120)
    return library
