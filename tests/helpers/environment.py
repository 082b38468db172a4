"""The environment that tests run in: the same on every machine and in every shell."""

import os
import tempfile
from collections.abc import MutableMapping

PINNED = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models gain nothing from more, and other tests may be running
    "LC_ALL": "C.UTF-8",
    "TERM": "xterm-256color",
    "ATTNSCOPE_NO_SERVER": "1",  # whatever serves on this machine
    "ATTNSCOPE_STAGES": "none",  # or a busy machine has a line more on stderr
    "ATTNSCOPE_READING_SECONDS": "600",  # of a text that is not about the deadline, on a busy machine
}
# What a person's shell may hold; COLUMNS is xdist's.
UNSET = {
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLORTERM", "MKL_NUM_THREADS"),
    *("RAY_ADDRESS", "MPLBACKEND", "PYTHONWARNINGS", "PYTHONIOENCODING", "PYTHONUTF8", "TQDM_DISABLE"),
    "PYTHONDONTWRITEBYTECODE",  # every process that a test starts would compile attnscope anew, for a second
}
UNSET_PREFIXES = ("HF_", "TRANSFORMERS_", "HUGGINGFACE_", "TYPER_", "ATTNSCOPE_")
KEPT = {"ATTNSCOPE_REQUIRE_BROWSER"}  # which says what the tests are to do
# Of TMPDIR: the path of a socket may have 108 bytes, and messages shorten long paths.
SHORT_ENOUGH = 40


def pin(environment: MutableMapping[str, str]) -> None:
    """Set what the package and its libraries read from an environment, where tests do not set it themselves."""
    for name in [*environment]:
        if name in UNSET or (name.startswith(UNSET_PREFIXES) and name not in KEPT):
            del environment[name]
    if len(os.fsencode(environment.get("TMPDIR", ""))) > SHORT_ENOUGH:
        environment["TMPDIR"] = tempfile.tempdir = "/tmp"
    environment.update(PINNED)
