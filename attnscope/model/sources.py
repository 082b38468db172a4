"""Where a model comes from: the embedded one, a folder, a GGUF file, the Hub, or an adapter with any of these as base.

What its files must be is checked here, before anything of them is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from attnscope.errors import ModelError, UsageError
from attnscope.model import adapters, checkpoint, gguf, hub
from attnscope.model.options import DEMO, LoadOptions

DEMO_FOLDER = Path(__file__).parents[1] / "demo"


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a folder, and for a Hub model the snapshot it belongs to.

    gguf: the file of the folder that is the whole model. adapter: where the adapter comes from, the model itself being
    its base.
    """

    name: str
    folder: Path
    snapshot: hub.Snapshot | None = None
    gguf: Path | None = None
    adapter: Source | None = None

    @property
    def source_folder(self) -> Path:
        """As of a LoadedModel."""
        return self.adapter.folder if self.adapter else self.gguf or self.folder

    @property
    def base_folder(self) -> Path | None:
        """As of a LoadedModel."""
        return (self.gguf or self.folder) if self.adapter else None

    @property
    def tokenizer_folder(self) -> Path:
        """Where its tokenizer lies: with the adapter, where that brings one."""
        brings = self.adapter and checkpoint.has_vocabulary(self.adapter.folder)
        return self.adapter.folder if self.adapter and brings else self.folder

    @property
    def revision(self) -> str | None:
        """The commit of a Hub model."""
        snapshot = self.adapter.snapshot if self.adapter else self.snapshot
        return snapshot.commit if snapshot else None

    @property
    def listing(self) -> frozenset[str] | None:
        """What the Hub has of it, where that is known: the folder holds no weights yet."""
        return self.snapshot.listing if self.snapshot else None

    @property
    def files(self) -> frozenset[str]:
        """The names of all files of the folder, downloaded or not; a link that leads nowhere is none."""
        return self.listing or frozenset(path.name for path in self.folder.iterdir() if path.is_file())

    @property
    def given(self) -> dict[str, str]:
        """What transformers must be given of it with the folder."""
        return {"gguf_file": self.gguf.name} if self.gguf else {}


def checked(options: LoadOptions) -> Source:
    """Where a model comes from, with a config that may be one of attention."""
    source = _alone(_find(options))
    if not source.gguf and adapters.is_adapter(source.folder):
        # The model is the adapter's base, which has a name, and perhaps a revision, of its own.
        base = adapters.base_of(source.folder, source.files, options.base)
        whole = _alone(_find(replace(options, model=base, revision=None)))
        if not whole.gguf and adapters.is_adapter(whole.folder):
            hint = "name a whole model: {base=FOLDER}"
            raise ModelError(f"the base of {source.name}, {base}, is an adapter too", hint)
        source = replace(whole, name=source.name, adapter=source)
        adapters.check_package()
    elif options.base is not None:
        raise UsageError(f"{options.model} is no adapter, and has no base", "leave out {base}")
    if source.gguf:
        gguf.check(source.gguf)
    else:
        checkpoint.check_config(source.folder)
    return source


def check_tokenizer(source: Source, options: LoadOptions) -> None:
    """Raise where there is nothing to build a tokenizer from."""
    if source.gguf is None or source.tokenizer_folder != source.folder:  # the file holds its own
        checkpoint.check_tokenizer(source.tokenizer_folder, options.trust_remote_code)


def weight_files(source: Source, options: LoadOptions) -> dict[Source, list[str]]:
    """The names of the files that hold the weights, of the adapter too."""
    adapter, pickles = source.adapter, options.allow_pickle
    own = [source.gguf.name] if source.gguf else checkpoint.weight_files(source.folder, pickles, source.listing)
    if adapter is None:
        return {source: own}
    return {source: own, adapter: [adapters.weight_file(adapter.folder, adapter.files, pickles)]}


def check_weights(source: Source, options: LoadOptions) -> None:
    """Raise where files of the weights are missing, damaged, or may run code."""
    if source.gguf is None:
        checkpoint.check_weights(source.folder, options.allow_pickle)
    if adapter := source.adapter:
        name = adapters.weight_file(adapter.folder, adapter.files, options.allow_pickle)
        checkpoint.check_weight_file(adapter.folder / name, options.allow_pickle)


def identity(source: Source, options: LoadOptions) -> str:
    """What its files are, in a word: commits of the Hub, hashes of folders; of an adapter both its own and its base's.

    >>> identity(checked(LoadOptions(model="gpt2")), LoadOptions())
    'commit 607a30d783df'
    """
    base = _identity(source, options, source.gguf)
    if source.adapter is None:
        return base
    weights = adapters.weight_file(source.adapter.folder, source.adapter.files, options.allow_pickle)
    return f"{_identity(source.adapter, options, source.adapter.folder / weights)} on {base}"


def _identity(source: Source, options: LoadOptions, weights: Path | None) -> str:
    """The commit of a source; of a folder a hash. weights: the one file that holds them, where it is no model's."""
    if source.snapshot:
        return f"commit {source.snapshot.commit[:12]}"
    return f"files {checkpoint.digest(source.folder, options.allow_pickle, [weights] if weights else None)[:12]}"


def _alone(source: Source) -> Source:
    """The source. Raises ModelError for a GGUF file next to an adapter, which transformers would apply unasked."""
    if source.gguf and adapters.is_adapter(source.folder):
        raise ModelError(
            f"{source.gguf} lies in the folder of an adapter, which would change it",
            "move the GGUF file to a folder of its own",
        )
    return source


def _find(options: LoadOptions) -> Source:
    """The folder of the model: its own, the embedded one, or a snapshot of the Hub's; or its GGUF file."""
    try:
        path = DEMO_FOLDER if options.model == DEMO else Path(options.model).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a folder around it that is closed to us, ~nobody
        why = getattr(error, "strerror", None) or error
        raise ModelError(f"{options.model} cannot be read: {why}", "check the path") from None
    if is_folder:
        if options.revision:
            raise UsageError(f"{options.model} is a folder and has no revisions", "leave out {revision}")
        return Source(options.model, path)
    if is_file and path.suffix == ".gguf":
        return Source(options.model, path.parent, gguf=path)
    if is_file:
        raise ModelError(f"{options.model} is a file, expected a folder", "pass the folder that holds it")
    if path.suffix == ".gguf" and (path.parent.is_dir() or options.model.count("/") != 1):
        raise ModelError(f"there is no file {options.model}", "check the path")
    if options.model.startswith((".", "/", "~")) or (options.model.count("/") != 1 and os.sep in options.model):
        raise ModelError(f"there is no folder {options.model}", "check the path, or pass a Hub id (owner/name)")
    snapshot = hub.fetch(options.model, options.revision, options.offline, options.trust_remote_code)
    return Source(options.model, snapshot.folder, snapshot)
