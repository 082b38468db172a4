"""What studies of heads' outputs can say of each family, on tiny models with every parameter drawn at random."""

from dataclasses import dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import attnscope
from attnscope.api.ablate import ablate
from attnscope.api.scan import scan
from attnscope.errors import InputError, ModelError, UsageError
from attnscope.hooks.projections import output_projections
from attnscope.model.loaded import LoadedModel
from attnscope.observe.logit_path import norms_after_attention, path_to_logits
from attnscope.observe.request import Request, View
from attnscope.studies.atlas import Plan, plan
from helpers.families import WITHOUT_ATTENTION
from helpers.parity_models import DECODERS, TYPES, ids_for, roused_model
from helpers.why_families import last_of, wrapped

STUDIES = ("direct", "relations --weights logit", "copying", "--weights value")
STUDIED = sorted((*TYPES, *WITHOUT_ATTENTION))
FEW = 8  # tokens


@dataclass(frozen=True)
class Studied:
    """One type: what is frozen on the way from its heads, and for each study `yes`, or why not, by its column.

    why: how far the contributions to a logit are from it, as a share of their sizes, or why they are not known. depth:
    how far the outputs of blocks are from the residuals, or weights times states from a mixture, or a refusal.
    """

    frozen: str
    studies: dict[str, str]
    why: str
    depth: str

    def answers(self, name: str) -> bool:
        """Whether a study says something of it."""
        return self.studies[name] == "yes"


def study(model_type: str) -> Studied:
    """Ask one family for each study."""
    if model_type in DECODERS:
        several = "reads several rows of ids for one text"
        return Studied("", dict.fromkeys(STUDIES, several), several, several)
    if model_type in WITHOUT_ATTENTION:
        without = "no softmax attention"
        return Studied("", dict.fromkeys(STUDIES, without), without, depth_error(model_type))
    loaded, ids = wrapped(roused_model(model_type)), ids_for(model_type)[0].tolist()[:FEW]
    way, norms = path_to_logits(loaded, ids), norms_after_attention(loaded, ids)
    gated = not isinstance(way, str) and not way.out.keys() <= output_projections(loaded, ids).keys()
    logit, value = _why_not(loaded, ids, "logit"), _why_not(loaded, ids, "value")
    found = (_direct(loaded), logit, _copying(loaded), value)
    frozen = ["gate or norm before the projection"] * gated + ["norm after it"] * bool(norms)
    errors = why_error(model_type), depth_error(model_type)
    return Studied(", ".join(frozen), dict(zip(STUDIES, found, strict=True)), *errors)


def why_error(model_type: str) -> str:
    """The error of the sum of contributions to a logit of the last layer, or in words why there is no such sum."""
    try:
        return f"{last_of(roused_model(model_type), ids_for(model_type)):.1e}"
    except ModelError as error:
        return str(error).partition(";")[0]


def depth_error(model_type: str) -> str:
    """The error of the sum of what blocks wrote, or in words why there is none."""
    try:
        ids = ids_for(model_type)[0].tolist()
        return f"{attnscope.depth(wrapped(roused_model(model_type)), ids).parts.error:.1e}"
    except ModelError as error:
        return str(error).partition(";")[0]


def _direct(loaded: LoadedModel) -> str:
    """`yes`, or in words why `ablate` has no direct effects."""
    layer = [layer for layer, heads in loaded.geometry.heads_by_layer.items() if heads][-1]
    try:
        found = ablate(loaded, f"{layer}.0", sequences=2, random=0)
    except ModelError as error:
        return str(error).partition(";")[0]
    alone = found.table().column("direct")[-1].as_py()
    return "yes" if alone is not None else str(found.found.facts["direct"])


def _copying(loaded: LoadedModel) -> str:
    """`yes`, or in words why `scan` has no probe of copying; of its trials one is read."""
    try:
        with patch("attnscope.api.scan.plan", _one_trial):
            found = scan(loaded, sequences=2, pool=range(10, 60))
    except ModelError as error:
        return str(error).partition(";")[0]
    return "yes" if "copying" in found.table()["probe"].to_pylist() else found.atlas.facts["not_measured"]["copying"]


def _one_trial(*given: Any, **how: Any) -> Plan:
    planned = plan(*given, **how)
    asks = [one for one in planned.trials if any(contrast.probe == "copying" for contrast in one.contrasts)]
    return replace(planned, trials=asks or planned.trials[:1])


def _why_not(loaded: LoadedModel, ids: list[int], weights: Literal["logit", "value"]) -> str:
    """`yes`, or in words why a view has no entries."""
    request = Request(view=View(weights), metrics=(), relations=True)
    try:
        if weights == "logit":
            attnscope.capture(loaded, ids[:-2], request=request, answer=ids[-2:])
        else:
            attnscope.capture(loaded, ids, request=request)
    except (UsageError, ModelError, InputError) as error:
        return str(error).partition(";")[0]
    return "yes"
