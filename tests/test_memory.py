"""Free memory, and the refusal of a text too large for it."""

from dataclasses import replace

import pytest

from attnscope.errors import MemoryLimitError
from attnscope.hooks.engines import eager_bytes
from attnscope.observe.engine_choice import choose
from attnscope.utils import memory
from attnscope.utils.memory import free_memory


def test_a_text_too_large_for_eager_is_refused_with_what_fits(demo, monkeypatch):
    monkeypatch.setattr(memory, "_machine_free", lambda: 1 << 30)
    monkeypatch.setattr(memory, "_cgroup_free", lambda *_: None)
    needed, on_cpu = eager_bytes(demo.geometry, 100_000, 4), replace(demo, device="cpu", dtype="float32")
    with pytest.raises(MemoryLimitError) as refused:
        choose(on_cpu, 100_000, "eager")
    assert refused.value.exit_code == 5
    assert f"{needed / 2**30:.1f} GiB" in refused.value.message
    fits = int(refused.value.hint.split()[0])
    choose(on_cpu, fits, "eager")
    with pytest.raises(MemoryLimitError):
        choose(on_cpu, fits + 1, "eager")


def cgroup(folder, limit, used, cache, names=("memory.max", "memory.current")):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 0\n")


@pytest.mark.parametrize(
    ("line", "base", "names"),
    [
        ("0::/a/b", "", ("memory.max", "memory.current")),
        ("4:cpu,memory:/a/b", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_the_tightest_cgroup_counts(tmp_path, line, base, names):
    root = tmp_path / "cgroup"
    cgroup(root / base / "a" / "b", 1000 if base else "max", 100, 0, names)
    cgroup(root / base / "a", 500, 300, 50, names)
    (tmp_path / "membership").write_text(f"{line}\n")
    assert memory._cgroup_free(root, tmp_path / "membership") == 500 - (300 - 50)


def test_no_cgroup_no_limit(tmp_path):
    assert memory._cgroup_free(tmp_path, tmp_path / "absent") is None
    (tmp_path / "membership").write_text("0::/\n")
    assert memory._cgroup_free(tmp_path, tmp_path / "membership") is None


def test_free_memory_is_of_this_machine():
    assert 1 << 20 < free_memory("cpu") < 1 << 50


def test_wishes_about_freed_memory_are_those_that_only_glibc_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    heard: list[tuple[int, int]] = []
    trimmed: list[int] = []

    class Library:
        @staticmethod
        def mallopt(parameter: int, value: int) -> int:
            heard.append((parameter, value))
            return 1

        @staticmethod
        def malloc_trim(kept: int) -> int:
            trimmed.append(kept)
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library)
    memory.keep_freed_memory()
    assert dict(heard) == {-3: 32 * 2**20, -1: 64 * 2**20}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of <malloc.h>
    memory.give_back_memory()
    assert trimmed == [0]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    memory.keep_freed_memory()
    memory.give_back_memory()
