"""`attnscope doctor`: what is installed, where it would run, and what it would find there."""

from __future__ import annotations

import os
import platform
import shutil
import webbrowser
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.cli import output
from attnscope.cli.config import with_options
from attnscope.cli.option_groups import cache_folder, cached_models
from attnscope.cli.output import Facts, Quiet

if TYPE_CHECKING:
    from rich.table import Table as RichTable

EXAMPLES = ("attnscope doctor", "attnscope doctor --format json")

PACKAGES = (
    *("attnscope", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "matplotlib", "typer"),
    *("triton", "numba", "ray", "bitsandbytes", "peft", "gguf", "soundfile", "soxr"),
)
SCRIPTS = {  # a character of each script for which figures need a font of the machine
    "Chinese": "銀",
    "Japanese": "か",
    "Korean": "은",
    "Arabic": "ب",
    "Hindi": "न",
    "Thai": "ธ",
    "emoji": "🙂",
}
# Variables that change what is found, what is drawn or how fast it runs; values of others are no one's business.
VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE"),
    *("TERM", "LANG", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
)
BROWSERS = ("firefox", "chromium", "chromium-browser", "google-chrome", "microsoft-edge")


@with_options(Facts, Quiet)
def doctor(printing: Facts, noise: Quiet) -> int:
    """Print system information for a bug report.

    One screen: versions, devices, fonts and caches. Nothing is downloaded and no model is loaded. Paths are written
    with ~ for the home folder.
    """
    from attnscope.model.libraries import silence_libraries

    silence_libraries(verbose=False)
    output.complain_through_talk(quiet=True)  # a script without a font is a row here
    facts = examined()
    output.tell(facts, printing.format, lambda: _sheet(facts))
    return 0


def examined() -> dict[str, Any]:
    """The facts as plain data: sizes in bytes."""
    import torch

    from attnscope.attention.kernels_cuda.operator import c_compiler, python_header
    from attnscope.figures.fonts import fonts_for

    names = {"cpu": platform.machine()}
    names |= {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    if torch.backends.mps.is_available():
        names["mps"] = platform.processor()
    # What Triton builds its kernels with, and the cuDNN that PyTorch brings.
    compiler, header = c_compiler(), python_header().is_file()
    # The first family is the one that draws everything else; a script without another would be boxes.
    fonts = {script: fonts_for([character]).families[1:] for script, character in SCRIPTS.items()}
    # Files of snapshots are links to blobs, which count once.
    folder, models = cache_folder(), cached_models()
    used = sum(_bytes(blob) for model in models for blob in (model / "blobs").glob("*"))
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {name: installed for name in PACKAGES if (installed := _version(name))},
        "devices": [{"device": device, "name": name, "free_bytes": _free(device)} for device, name in names.items()],
        "kernels": {"cc": compiler, "python_header": header, "cudnn": torch.backends.cudnn.version()},
        "threads": {"torch": torch.get_num_threads(), "cores": os.cpu_count()},
        "fonts": {script: next(iter(families), None) for script, families in fonts.items()},
        "browser": _browser(),
        "cache": {"folder": _tilde(str(folder)), "models": len(models), "bytes": used, "free_bytes": _room(folder)},
        "environment": {name: _tilde(os.environ[name]) for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    if package == "torch":
        import torch

        return torch.__version__  # its build too, which the package's own file leaves out for CUDA
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _free(device: str) -> int | None:
    """Its free bytes, None where a broken driver does not say: that, too, belongs into the report."""
    from attnscope.utils.memory import free_memory

    with suppress(RuntimeError):
        return free_memory(device)
    return None


def _browser() -> str | None:
    """The browser that opens a page; without a display one that is installed, which says so."""
    with suppress(webbrowser.Error):
        return Path(webbrowser.get().name).name
    name = next(filter(shutil.which, BROWSERS), None)
    return name and f"{name}, without a display to open it on"


def _bytes(file: Path) -> int:
    """Its bytes, 0 where a link leads nowhere."""
    with suppress(OSError):
        return file.stat().st_size
    return 0


def _room(folder: Path) -> int | None:
    """The bytes free where the folder is or would be, None where the disk does not say."""
    with suppress(OSError):
        return shutil.disk_usage(next(path for path in (folder, *folder.parents) if os.path.exists(path))).free
    return None


def _tilde(path: str) -> str:
    home = os.path.expanduser("~")
    return f"~{path.removeprefix(home)}" if path.startswith(home + os.sep) else path


def _sheet(facts: dict[str, Any]) -> RichTable:
    """A line for a person of each fact."""
    from rich.table import Table
    from rich.text import Text

    cache, threads = facts["cache"], facts["threads"]
    fonts = {script: font or "none, labelled by position" for script, font in facts["fonts"].items()}
    kernels = facts["kernels"]
    header = "Python.h" if kernels["python_header"] else "no Python.h"
    lines = [
        ("python", f"{facts['python']}, {facts['system']}"),
        *facts["versions"].items(),
        *((device["device"], f"{device['name']}, {_size(device['free_bytes'])} free") for device in facts["devices"]),
        ("kernels", f"{kernels['cc'] or 'no C compiler'}, {header}, cuDNN {kernels['cudnn'] or 'none'}"),
        ("threads", f"{threads['torch']} of torch, {threads['cores']} cores"),
        *((f"font: {script}", font) for script, font in fonts.items()),
        ("browser", facts["browser"] or "none"),
        (
            "cache",
            f"{cache['folder']}, {cache['models']} models, {_size(cache['bytes'])}; {_size(cache['free_bytes'])} free",
        ),
        *facts["environment"].items(),
    ]
    sheet = Table.grid(padding=(0, 2))
    for name, line in lines:
        sheet.add_row(Text(name, style="dim"), Text(line))
    return sheet


def _size(count: int | None) -> str:
    from attnscope.utils.memory import human_bytes

    return "unknown" if count is None else human_bytes(count)
