"""The libraries underneath: their versions, their switches, and their progress bars, logs and warnings."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from attnscope._version import __version__
from attnscope.errors import ModelError
from attnscope.utils.signals import ProcessWide

TRIED = ("5.17.0", "5.23.0")  # versions of transformers, the oldest and the newest: docs/versions.md


class Switch:
    """A setting of a library that all its calls share, which has another value as long as anyone holds it.

    >>> with OFFLINE.held():
    ...     huggingface_hub.constants.is_offline_mode()
    True
    """

    _turn = threading.Lock()

    def __init__(self, module: str, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value
        self._holders, self._before = 0, None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._turn:
            before, module = needed(self.module, self.name), import_module(self.module)
            if not self._holders:
                self._before = before
                setattr(module, self.name, self.value)
            self._holders += 1
        try:
            yield
        finally:
            with self._turn:
                self._holders -= 1
                if not self._holders:
                    setattr(module, self.name, self._before)


OFFLINE = Switch("huggingface_hub.constants", "HF_HUB_OFFLINE", True)
# Whether it may run a model's code is then a refusal of transformers, and no question on standard input.
NEVER_ASKS = Switch("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0)


QUIET = {  # what has them say nothing
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "critical",
    "TRANSFORMERS_VERBOSITY": "critical",  # an error is raised too, and with some the whole config is printed
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "BITSANDBYTES_NOWELCOME": "1",
}


def silence_libraries(verbose: bool) -> None:
    """Silence the progress bars, logs and warnings of the libraries underneath, unless `verbose`.

    To be called before the first import of them: they read these variables once. For those already imported the same is
    done through their own functions.

    Example:
        silence_libraries(verbose=False)
    """
    if verbose:
        return
    os.environ |= QUIET
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", module=r"attnscope(\.|$)")
    warnings.filterwarnings("ignore", category=ResourceWarning)  # of files that they leave open, wherever it is noticed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for every layer that it casts
    logging.getLogger("torchao").setLevel(logging.ERROR)  # a line for every kernel of another device
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # two lines that torchao causes
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # two lines where there is no home for its own cache
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if "transformers" in sys.modules:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity(logging.CRITICAL)
        transformers_logging.disable_progress_bar()


@ProcessWide
@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection while the block imports: all that it makes stays, and looking for garbage in it takes a
    fifth of the time.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


@ProcessWide
@contextmanager
def bars_as_elsewhere() -> Iterator[None]:
    """While the block runs, bars that libraries draw with tqdm itself are drawn where those of transformers are."""
    from transformers.utils.logging import is_progress_bar_enabled

    tqdm = import_module("tqdm.std").tqdm
    own = tqdm.__init__

    @wraps(own)
    def init(self: Any, *args: Any, **options: Any) -> None:
        own(self, *args, **(options if is_progress_bar_enabled() else options | {"disable": True}))

    tqdm.__init__ = init
    try:
        yield
    finally:
        tqdm.__init__ = own


@contextmanager
def without_bars() -> Iterator[None]:
    """No progress bar of transformers while the block runs; afterwards as it was."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def needed(module: str, name: str, *attributes: str) -> Any:
    """A name of transformers that is not promised to stay, with attributes that are not either.

    Raises ModelError with the versions that have it.

    >>> needed("transformers.modeling_utils", "AttentionInterface", "get_interface").__name__
    'AttentionInterface'
    """
    import transformers

    try:
        value = getattr(import_module(module), name)
        for attribute in attributes:
            getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        path = ".".join((module, name, *attributes))
        raise ModelError(
            f"transformers {transformers.__version__} has no {path}, which attnscope needs",
            f'install one that was tried: pip install "transformers>={TRIED[0]},<={TRIED[-1]}"',
        ) from error
    return value


def knows_interface(kind: type) -> bool:
    """Whether the file of transformers that a class comes from asks its attention interface.

    >>> knows_interface(transformers.ViTModel)
    True
    """
    return hasattr(sys.modules.get(kind.__module__), "ALL_ATTENTION_FUNCTIONS")


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    import torch
    import transformers

    return {
        "attnscope": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
