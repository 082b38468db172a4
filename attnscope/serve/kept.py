"""Models that stay loaded in one process, for commands that run in it one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnscope.serve import identity

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel
    from attnscope.model.options import LoadOptions

MOST = 4  # models at once


class KeptModels:
    """The models that were loaded last, each as long as its files are as they were."""

    def __init__(self) -> None:
        self._kept: dict[LoadOptions, tuple[LoadedModel, identity.Files]] = {}

    def load(self, options: LoadOptions) -> LoadedModel:
        """A model, loaded where it is not there; raises as `attnscope.model.loading.load` does."""
        from attnscope.model.loading import load

        if options.trust_remote_code or options.allow_pickle:
            return load(options)
        found = self._kept.pop(options, None)
        if found is None or found[1] != identity.files(found[0].source_folder, found[0].base_folder):
            loaded = load(options)
            found = loaded, identity.files(loaded.source_folder, loaded.base_folder)
        self._kept[options] = found
        if len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        return found[0]
