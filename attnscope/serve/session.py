"""`attnscope.connect`: captures of a model that `attnscope serve` holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from attnscope.api.capture import is_several, kept
from attnscope.api.captured import Capture
from attnscope.errors import ModelError, UsageError, hints_of
from attnscope.model.options import LoadOptions
from attnscope.observe.request import CaptureOptions, CaptureSpec, Request, View
from attnscope.serve.client import ask_server, request_status
from attnscope.serve.wire import UnansweredError
from attnscope.utils.schema import takes_fields
from attnscope.utils.stages import NO_PROGRESS

START = "start one: attnscope serve --model "


@hints_of(LoadOptions)
@takes_fields(LoadOptions)
def connect(options: LoadOptions) -> Session:
    """A session with the model that a server of this user's holds; options: how it was loaded, as for `load`.

    Raises ModelError without a server, UsageError for an option that does not exist.

        >>> session = attnscope.connect()
        >>> session.capture("the financial bank").weights[0].shape
    """
    try:
        request_status("status")
    except UnansweredError as why:
        raise ModelError(str(why), START + options.model) from None
    return Session(options)


@dataclass(frozen=True)
class Session:
    """A model that a server holds."""

    options: LoadOptions

    @hints_of(CaptureOptions, Request, View, LoadOptions)
    def capture(
        self,
        text: Any,
        layers: Sequence[int] | None = None,
        *,
        request: Request | None = None,
        query: str | int | None = None,
        key: str | int | None = None,
        define: Mapping[str, str] | None = None,
        **how: Unpack[CaptureOptions],
    ) -> Any:
        """As `attnscope.capture` of that model: a Capture, or of a list of texts a list of them.

        Raises what that raises, and ModelError where the server does not answer: it does not hold the model with these
        options and files, it runs other code, or it has ended.
        """
        if how.get("verify"):
            raise UsageError("a server does not verify", "load the model with attnscope.load")
        if layers is not None and request is None and how.get("select") is None:
            how["select"] = ",".join(f"{layer}.*" for layer in layers)
        elif layers is not None:
            raise UsageError("layers and request or select were both given", "choose heads with {select=1.*} alone")
        keep = kept(None, request, query, key, define, how)
        if is_several(text):
            return [self._captured(CaptureSpec(item, keep, **how)) for item in text]
        return self._captured(CaptureSpec(text, keep, **how))

    def _captured(self, ask: CaptureSpec) -> Capture:
        try:
            return Capture.made_of(ask_server(self.options, ask, NO_PROGRESS, tensor=torch.from_numpy))
        except UnansweredError as why:
            raise ModelError(f"the server does not answer: {why}", "see attnscope serve status") from why
