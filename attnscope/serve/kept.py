"""Models that stay loaded in one process, for commands that run in it one after the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attnscope.errors import UsageError
from attnscope.serve.identity import Contents, Files, files

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.options import LoadOptions

MOST = 4  # models at once


class KeptModels:
    """The models that were loaded last, each as long as its files hold what they held."""

    def __init__(self) -> None:
        self._kept: dict[LoadOptions, tuple[LoadedModel, Contents]] = {}

    def load(self, options: LoadOptions) -> LoadedModel:
        """A model, loaded where it is not there; raises as `attnscope.model.loading.load` does."""
        from attnscope.model.loading import load

        if options.trust_remote_code or options.allow_pickle:
            return load(options)
        entry = self._kept.pop(options, None)
        if entry is None or not entry[1].same(_files_of(entry[0])):
            began = time.time_ns()
            loaded = load(options)
            states = _files_of(loaded)
            if not states or any(state.changed_ns >= began for state in states.values()):
                return loaded  # which of their contents was loaded is not known
            entry = loaded, Contents(states)
        self._kept[options] = entry
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        return entry[0]


def _files_of(loaded: LoadedModel) -> Files:
    """The files of a model; none where they cannot be watched."""
    try:
        return files(loaded.source_folder, loaded.base_folder)
    except UsageError:
        return {}
