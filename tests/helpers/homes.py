"""A user without a home: an id without an entry in passwd, as containers have them, and no HOME."""

import pytest

VARIABLES = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")


def without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is such a user's."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
