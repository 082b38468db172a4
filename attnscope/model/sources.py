"""Where a model comes from: the embedded one, a folder, a GGUF file, the Hub, or an adapter with any of these as base.

What its files must be is checked here, before anything of them is loaded.

A model of the Hugging Face Hub -> a folder in the local cache, with an answer in bounded time.

The Hub is first asked, under a deadline, what a revision holds; the config and the tokenizer are downloaded before the
weights, so that a model that can't be read is refused early. When the Hub does not answer, the cached snapshot is used.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnscope.errors import ModelError, UsageError
from attnscope.model import adapters, checkpoint, gguf
from attnscope.model.options import DEMO, LoadOptions
from attnscope.utils.isolation import within

# Connecting, TLS and reading each get ANSWER_SECONDS; DEADLINE_SECONDS bounds them all, and name resolution with them.
ANSWER_SECONDS = 8.0
DEADLINE_SECONDS = 14.0
ERRNO = re.compile(r"\[Errno -?\d+\] ")
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.vocab")
REVISION = re.compile(r"[^\s/\x00-\x1f][^\s\x00-\x1f]{0,199}")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A revision of a model in the cache: its folder, its commit, and the names there are (None when only cached)."""

    name: str
    folder: Path
    commit: str
    listing: frozenset[str] | None


def fetch(name: str, revision: str | None = None, offline: bool = False, code: bool = False) -> Snapshot:
    """Config and tokenizer of a Hub model (and its Python files when `code`), downloaded unless cached.

    Raises `ModelError`: not on the Hub, gated, no such revision, Hub unreachable, not in the cache.

    Example:
        fetch("gpt2").folder  # ~/.cache/huggingface/hub/models--gpt2/snapshots/607a30d7...
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    # Both become part of a path: names that can be none of the Hub's are refused before that.
    try:
        good = HUB_ID.fullmatch(name) is not None
        validate_repo_id(name)
    except HFValidationError:
        good = False
    if not good:
        raise ModelError(f"{name!r} is neither a folder nor a Hub id", "a Hub id has the form owner/name")
    if revision is not None and (not REVISION.fullmatch(revision) or ".." in revision):
        raise ModelError(f"{name} has no revision {revision!r}", "pass a branch, a tag or a commit of the model")

    # A Hub that does not answer is no reason to fail where the model is in the cache.
    if offline or constants.HF_HUB_OFFLINE:
        return _cached(name, revision, "the run is offline")
    try:
        info = within(DEADLINE_SECONDS, lambda: HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS))
    except Exception as error:  # no connection, no name, no proxy, no certificate, no JSON: each library has its own
        if isinstance(error, HfHubHTTPError):
            refusal = _refusal(name, revision, error)
        else:
            what = ERRNO.sub("", str(error).strip().partition("\n")[0]) or type(error).__name__
            refusal = UnreachableError(f"the Hugging Face Hub ({constants.ENDPOINT}) cannot be reached: {what}")
        if not isinstance(refusal, UnreachableError):
            raise refusal from None
        snapshot = _cached(name, revision, refusal.message)
        logger.warning("%s; using the cached copy, commit %s", refusal.message, snapshot.commit[:12])
        return snapshot
    patterns = [*SMALL_FILES, "*.py"] if code else [*SMALL_FILES]
    # By its own name, not by the commit: the cache then remembers which commit the branch was, for a run offline.
    folder = _download(name, revision or constants.DEFAULT_REVISION, patterns)
    return Snapshot(name, folder, folder.name, frozenset(file.rfilename for file in info.siblings or ()))


def fetch_weights(snapshot: Snapshot, names: list[str]) -> None:
    """Download these files of a snapshot, unless they are there."""
    missing = [name for name in names if not (snapshot.folder / name).is_file()]
    if missing and snapshot.listing is None:
        raise ModelError(
            f"{snapshot.name}: {missing[0]} is not in the local cache, and the Hub is out of reach",
            "download the model once with network, or pass its folder",
        )
    if missing:
        _download(snapshot.name, snapshot.commit, missing)


class UnreachableError(ModelError):
    """The Hub did not answer."""


def _refusal(name: str, revision: str | None, error: Any) -> ModelError:
    """What the Hub's refusal means for the person who asked."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code
    if isinstance(error, GatedRepoError) or (status in (401, 403) and not isinstance(error, RepositoryNotFoundError)):
        page = f"{constants.ENDPOINT}/{name}"
        return ModelError(
            f"{name} is gated: the Hub refuses it ({status})", f"ask for access at {page}, then run: hf auth login"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelError(
            f"there is no folder and no public Hub model named {name!r}",
            "check the spelling; for a private model run: hf auth login",
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{name} has no revision {revision!r}", "pass a branch, a tag or a commit of the model")
    return UnreachableError(f"the Hugging Face Hub ({constants.ENDPOINT}) answered with an error: {status}")


def _cached(name: str, revision: str | None, why: str) -> Snapshot:
    """The cached snapshot of a revision, or a `ModelError` that says why it was not downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns="config.json"))
    except (LocalEntryNotFoundError, OSError):  # not there, or the cache is no folder
        raise ModelError(
            f"{name} is neither a folder nor in the local cache, and {why}",
            "download the model once with network, or pass a folder: {model=path/to/model}",
        ) from None
    return Snapshot(name, folder, folder.name, None)


def _download(name: str, revision: str, patterns: list[str]) -> Path:
    """The snapshot folder, with the files of the repository's top folder that match."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns="*/*"))
    except HfHubHTTPError as error:
        raise _refusal(name, revision, error) from None
    except Exception as error:  # as in `fetch`
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{name} could not be downloaded: {what}", "run the command again; it resumes") from None


DEMO_FOLDER = Path(__file__).parents[1] / "demo"


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a folder, and for a Hub model the snapshot it belongs to.

    gguf: the file of the folder that is the whole model. adapter: where the adapter comes from, the model itself being
    its base.
    """

    name: str
    folder: Path
    snapshot: Snapshot | None = None
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


def find_source(options: LoadOptions) -> Source:
    """Where a model comes from, with a config that may be one of attention."""
    source = _find(options)
    if not source.gguf and checkpoint.is_adapter(source.folder):
        # The model is the adapter's base, which has a name, and perhaps a revision, of its own.
        base = adapters.base_of(source.folder, source.files, options.base)
        whole = _find(replace(options, model=base, revision=None))
        if not whole.gguf and checkpoint.is_adapter(whole.folder):
            hint = "name a whole model: {base=FOLDER}"
            raise ModelError(f"the base of {source.name}, {base}, is an adapter too", hint)
        source = replace(whole, name=source.name, adapter=source)
        if find_spec("peft") is None:
            raise ModelError("reading an adapter needs peft", 'pip install "attnscope[peft]"')
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

    >>> identity(find_source(LoadOptions(model="gpt2")), LoadOptions())
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
        if checkpoint.is_adapter(path.parent):  # transformers would apply it unasked
            raise ModelError(
                f"{path} lies in the folder of an adapter, which would change it",
                "move the GGUF file to a folder of its own",
            )
        return Source(options.model, path.parent, gguf=path)
    if is_file:
        raise ModelError(f"{options.model} is a file, expected a folder", "pass the folder that holds it")
    if path.suffix == ".gguf" and (path.parent.is_dir() or options.model.count("/") != 1):
        raise ModelError(f"there is no file {options.model}", "check the path")
    if options.model.startswith((".", "/", "~")) or (options.model.count("/") != 1 and os.sep in options.model):
        raise ModelError(f"there is no folder {options.model}", "check the path, or pass a Hub id (owner/name)")
    snapshot = fetch(options.model, options.revision, options.offline, options.trust_remote_code)
    return Source(options.model, snapshot.folder, snapshot)
