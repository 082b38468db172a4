"""What Triton needs of a machine before any kernel: a C compiler and Python's headers, of which it builds its driver.

Asked once per process, so that what is missing is named once and not by the compiler, kernel for kernel.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from functools import cache
from pathlib import Path

from attnscope.utils.isolation import without_stderr


def c_compiler() -> str | None:
    """The C compiler that Triton would call: what CC says, gcc or clang; None for none."""
    chosen = os.environ.get("CC")
    return next((name for name in ((chosen,) if chosen else ("gcc", "clang")) if shutil.which(name)), None)


def python_header() -> Path:
    """Where Python's header would be."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton looks for it
    return Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"


@cache
def missing() -> str:
    """Why no kernel can be built here, "" where Triton's driver is there."""
    from triton.runtime import driver

    try:
        with without_stderr():  # where the compiler says it at length
            driver.active.utils  # noqa: B018 - built at the first look
    except Exception as error:  # whatever a compiler, a linker or a driver does
        if c_compiler() is None:
            return "needs a C compiler, and there is none: install gcc"
        if not python_header().is_file():
            return "needs Python's headers, and there are none: install python3-dev"
        first = (str(error).strip().splitlines() or [""])[0]
        return f"has no driver here: {type(error).__name__}: {first}"[:200]
    return ""
