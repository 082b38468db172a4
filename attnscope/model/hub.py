"""A model of the Hugging Face Hub -> a folder in the local cache, with an answer in bounded time.

The Hub is first asked, under a deadline, what a revision holds; the config and the tokenizer are downloaded before the
weights, so that a model that can't be read is refused early. When the Hub does not answer, the cached snapshot is used.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnscope.errors import ModelError
from attnscope.utils.isolation import within

# Connecting, TLS and reading each get ANSWER_SECONDS; DEADLINE_SECONDS bounds them all, and name resolution with them.
ANSWER_SECONDS = 8.0
DEADLINE_SECONDS = 14.0
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
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
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
        info = _ask(name, revision)
    except ModelError as error:
        if not isinstance(error, UnreachableError):
            raise
        snapshot = _cached(name, revision, error.message)
        logger.warning("%s; using the cached copy, commit %s", error.message, snapshot.commit[:12])
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


def _ask(name: str, revision: str | None) -> Any:
    """The Hub's description of a revision."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return within(DEADLINE_SECONDS, lambda: HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS))
    except HfHubHTTPError as error:
        raise _refusal(name, revision, error) from None
    except Exception as error:  # no connection, no name, no proxy, no certificate, no JSON: each library has its own
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnreachableError(f"the Hugging Face Hub ({constants.ENDPOINT}) cannot be reached: {what}") from None


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
    except Exception as error:  # as in `_ask`
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"{name} could not be downloaded: {what}", "run the command again; it resumes") from None
