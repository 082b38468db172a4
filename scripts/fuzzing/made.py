"""What kinds damage copies of: models, runs and studies, each made once, when it is first asked for."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from attnscope.model.libraries import without_bars
from attnscope.model.loading import DEMO_FOLDER, load
from attnscope.model.options import LoadOptions
from attnscope.utils.signals import Stopped
from fuzzing.judging import lay_out
from fuzzing.trying import Try, fork
from fuzzing.words import NASTY, TEXT, edit

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # its helpers make tiny models
TEXTS = "a bank\nthe river\n"


@cache
def room() -> Path:
    """Where all that is made here is, until this process ends."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-made-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


def model_folder(folder: Path, **config: Any) -> Path:
    """A copy of the demo, its config changed."""
    target = folder / "model"
    shutil.copytree(DEMO_FOLDER, target, ignore=shutil.ignore_patterns("*.md", "training.json", "LICENSE"))
    if config:
        edit(target / "config.json", lambda values: values.update(config))
    return target


@cache
def shallow() -> Path:
    """The demo's first layer: a study of it takes a fraction of the time."""
    from safetensors.numpy import load_file, save_file

    (place := room() / "shallow").mkdir()
    model = model_folder(place, num_hidden_layers=1)
    tensors = load_file(model / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not any(f".layers.{n}." in name for n in (1, 2, 3))}
    save_file(kept, model / "model.safetensors", {"format": "pt"})
    return model


@cache
def whisper() -> Path:
    """A tiny Whisper with feature extractor and tokenizer."""
    from helpers.sounds import saved_whisper

    with without_bars():
        return saved_whisper(room() / "whisper")


@cache
def llava() -> Path:
    """A tiny LLaVA with its processor."""
    from helpers.picture_models import saved

    with without_bars():
        return Path(saved("llava", room()))


@cache
def gguf() -> Path:
    """The demo as a GGUF file."""
    from helpers.brought import a_gguf

    with without_bars():
        return a_gguf(room() / "demo.gguf", load(LoadOptions()).model)


@cache
def picture() -> Path:
    """A small picture."""
    from helpers import picture_models

    return Path(picture_models.picture(room() / "field.png"))


@cache
def sound(form: str = "WAV", kind: str | None = None) -> bytes:
    """Half a second of a tone, in a format of soundfile."""
    import io

    import soundfile

    from helpers.sounds import samples

    soundfile.write(file := io.BytesIO(), samples(0.5), 16_000, format=form, subtype=kind)
    return file.getvalue()


@cache
def kernel() -> Path:
    """The value of NUMBA_CACHE_DIR with which the kernel that the user has, or that is compiled now, is found."""
    from attnscope.attention.kernels_cpu import object_code

    own = {name: os.environ.get(name) for name in ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    ran("kernel", Try(["heads", "-q", "--engine", "numba", "--text", TEXT], environment=own))
    where = Path(own["NUMBA_CACHE_DIR"] or own["XDG_CACHE_HOME"] or Path.home() / ".cache", "attnscope")
    [kept] = where.rglob(f"sweep-{object_code._key()}.bin")
    place = room() / "kernels" / "attnscope" / kept.relative_to(where)
    place.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(kept, place)
    return room() / "kernels"


OTHER = TEXT.replace("and", "bank")
COMMANDS = {  # that leave a folder; TEXTS is a file of texts
    "run": ["heads", "--text", TEXT, "--figures", "overview"],
    "batch": ["batch", "TEXTS", "--tables", "heads,relations"],
    "summary": ["batch", "TEXTS", "--summary", "--spans", "a=first", "--spans", "b=last", "--key", "first"],
    "scan": ["scan", "MODEL", "--sequences", "2"],
    "texts": ["scan", "MODEL", "--sequences", "2", "--texts", "TEXTS"],
    "ablate": ["ablate", "MODEL", "--sequences", "2", "--random", "2", "--select", "0.0,0.1"],
    "pairs": ["ablate", "MODEL", "--sequences", "2", "--pairs", "--select", "0.0,0.1"],
    "prune": ["ablate", "MODEL", "--sequences", "2", "--prune", "--select", "0.0,0.1"],
    "knockout": ["knockout", "--text", TEXT, "--key", "first", "--over", "layers", "--random", "2"],
    "patch": ["patch", "--text", TEXT, "--corrupted", OTHER, "--at", "last", "--over", "layers", "--random", "0"],
    "budgets": ["knockout", "--text", TEXT, "--keep", "stream:1+2,h2o:3", "--over", "layers"],
    "why": ["why", "--text", TEXT, "--head", "L1H0", "--key", "first"],
    "compare": ["compare", "--text", TEXT, "--compare-text", "the bank"],
    "models": ["compare", "--compare-model", "MODEL", "--model", "MODEL", "--texts", "TEXTS"],
}  # fmt: skip


def command(name: str, out: Path | None = None) -> list[str]:
    """One of the commands that leave a folder, quiet, into that folder."""
    (texts := room() / "texts.txt").write_text(TEXTS)
    given = {"TEXTS": str(texts), "MODEL": str(shallow()) if "MODEL" in COMMANDS[name] else ""}
    words = [given.get(one, one) for one in COMMANDS[name]]
    return [words[0], "-q", *words[1:], *(["--out", str(out)] if out else [])]


@cache
def left(name: str) -> Path:
    """The folder that a command has left."""
    runs = room() / name / "here" / "runs"
    ran(name, Try(command(name, runs)))
    return runs


@cache
def baseline() -> bytes:
    """The file that a comparison saves for a later one."""
    path = room() / "base.json"
    ran("baseline", Try(["compare", "-q", "--text", TEXT, "--save-baseline", str(path)]))
    return path.read_bytes()


@cache
def stopped(name: str) -> Path:
    """The folder of a study that a signal has stopped, with the first batch of its first part."""
    runs = room() / f"stopped-{name}" / "here" / "runs"
    ended = fork(Try(command(name, runs), before=stop_early), lay_out(room() / f"stopped-{name}"))
    if b"1 of " not in ended.err:
        raise RuntimeError(f"{name} was not stopped: {ended.err.decode(errors='replace')}")
    return runs


def one_by_one() -> None:
    """Have studies read every sequence in a batch of its own."""
    from attnscope.interventions import passes
    from attnscope.studies import atlas as findings

    passes.CPU_TOKENS = findings.BATCH_TOKENS = 1


def stop_early() -> None:
    """Have a study end as with Ctrl-C, once a batch is kept."""
    from attnscope.studies.study_folder import Parts

    one_by_one()
    keep = Parts.batch

    def kept(self: Parts, *given: Any, **how: Any) -> Any:
        keep(self, *given, **how)
        raise Stopped(signal.SIGINT)

    Parts.batch = kept  # type: ignore[method-assign]


def ran(name: str, one: Try) -> bytes:
    """What a command that has to succeed prints."""
    ended = fork(one, lay_out(room() / name))
    if ended.code != 0:
        raise RuntimeError(f"{name} left with {ended.code}: {ended.err.decode(errors='replace')}")
    return ended.out


def copied(path: Path, folder: Path, name: str = "model") -> Path:
    """A copy of a folder, to be damaged."""
    return Path(shutil.copytree(path, folder / name, symlinks=True))


def lines(*rows: Any) -> bytes:
    """A corpus of JSON objects."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def other_table(rng: random.Random, path: Path) -> bytes:
    """The table with one column missing, null, twice, or of another type."""
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(path)
    at = rng.randrange(table.num_columns)
    name, count = table.column_names[at], len(table)
    columns = (
        pa.nulls(count, table.schema.types[at]),
        pa.nulls(count),
        pa.array(["x"] * count),
        pa.array([[1]] * count),
    )
    columns += (pa.array([float("nan")] * count), pa.array([-(2**62)] * count), pa.array([NASTY[0]] * count))
    if (way := rng.random()) < 0.2:
        table = table.drop_columns([name])
    elif way < 0.3:
        table = table.append_column(name, table[at])
    elif way < 0.4:
        table = pa.concat_tables([table, table])
    else:
        table = table.set_column(at, name, rng.choice(columns))
    parquet.write_table(table, sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()
