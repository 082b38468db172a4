"""Many tries of every kind in turn, and what was flagged."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import random
import shutil
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fuzzing.judging import beside, faults, lay_out
from fuzzing.made import kernel
from fuzzing.trying import KINDS, fork

LATE = """
    bitsandbytes gguf huggingface_hub llvmlite.binding matplotlib.pyplot peft pyarrow.csv pyarrow.ipc pyarrow.parquet
    rich.progress rich.table safetensors.torch seaborn soundfile soxr transformers.models.auto.feature_extraction_auto
    transformers.models.auto.image_processing_auto transformers.models.auto.processing_auto
    transformers.models.auto.tokenization_auto transformers.models.llama.modeling_llama
    transformers.models.llama.tokenization_llama transformers.models.llava.modeling_llava
    transformers.models.llava.processing_llava transformers.models.whisper.modeling_whisper
    transformers.models.whisper.feature_extraction_whisper transformers.generation yaml
"""  # what commands import while they run


@dataclass
class Report:
    """Tries by kind and exit code, and what was flagged."""

    codes: dict[str, Counter[int | None]] = field(default_factory=dict)
    flagged: list[str] = field(default_factory=list)


def fuzz(
    tries: int,
    seed: int,
    only: tuple[str, ...] = (),
    seconds: float = float("inf"),
    first: int = 0,
    keep: Path | None = None,
) -> Report:
    """So many tries, of every kind in turn, or as many as fit into the seconds; the seed and its number make each."""
    report, until, kinds = Report(), time.monotonic() + seconds, only or tuple(KINDS)
    for number in range(first, first + tries):
        if time.monotonic() > until:
            break
        name = kinds[number % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
            folder = lay_out(Path(place))
            one = KINDS[name](random.Random(f"{seed} {name} {number}"), folder)
            before = beside(folder)
            ended = fork(one, folder)
            report.codes.setdefault(name, Counter())[ended.code] += 1
            found = faults(one, ended, folder, before)
            if found and keep:
                _leave(Path(place), keep / f"{name}-{number}")
        said = ended.err.decode(errors="replace").strip()[-300:]
        words = [word[:80].replace(str(folder), ".") for word in one.arguments]
        for fault in found:
            report.flagged.append(f"{name} {number}: {fault}: {words}: {said!r}")
            print(f"flagged: {report.flagged[-1]}", flush=True)
    return report


def _leave(place: Path, kept: Path) -> None:
    """Move the folder of a try to where it stays."""
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(parents=True, exist_ok=True)
    place.rename(kept)
    place.mkdir()


def import_everything() -> None:
    """What commands import, before the first fork; threads do not live through one."""
    import torch

    import attnscope

    for name in [*(module.name for module in pkgutil.walk_packages(attnscope.__path__, "attnscope.")), *LATE.split()]:
        if not name.endswith("__main__") and ".kernels_cuda." not in name:  # Triton may not be here
            with suppress(ModuleNotFoundError):  # what an extra brings
                importlib.import_module(name)
    with suppress(ModuleNotFoundError):  # what some versions of typer import while a command runs, and pydantic with it
        importlib.import_module("typer._adapters")
    torch.set_num_threads(1)
    gc.freeze()  # nothing of it is looked at in the forks, which would copy it
    os.environ["NUMBA_CACHE_DIR"] = str(kernel())
