"""What texts lose where a layer gives nothing. Shapes: S text, N layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from attnscope.interventions.base import LOSS, Measure, Replacing
from attnscope.interventions.passes import Advance
from attnscope.interventions.spec import HeadPlan, HeadSet, Task
from attnscope.studies.ablation import texts
from attnscope.studies.statistics import effect_columns, largest_of
from attnscope.studies.study import SetStudy, effects_by_set
from attnscope.studies.study_folder import Parts, StudyRecord
from attnscope.utils.tables import as_table, words

if TYPE_CHECKING:
    from attnscope.model.loaded import LoadedModel


@dataclass(frozen=True, repr=False)
class SilenceResult(StudyRecord):
    """What was measured. effect_SN: what each layer's silence costs each text."""

    stem = "silence"

    names: tuple[str, ...]
    effect_SN: np.ndarray
    facts: Mapping[str, Any]

    @property
    def line(self) -> str:
        """The costliest layer."""
        effect_N = self.effect_SN.mean(0)
        worst = largest_of(effect_N)
        return f"{len(self.names)} layers: costliest {self.names[worst]}, {effect_N[worst]:+.3f} {self.unit}"

    def table(self) -> pa.Table:
        """A row per layer, with the columns of `effect_columns`."""
        return as_table({"set": words(self.names), **effect_columns(self.effect_SN)})


@dataclass(frozen=True)
class SilenceStudy(SetStudy[SilenceResult]):
    """What texts lose where the chosen heads of one layer give nothing."""

    kind, readings, schema, stage = "silence", "silence", "silence/1", "silencing"

    model: LoadedModel
    texts: Sequence[str]
    plan: HeadPlan = HeadPlan()

    @cached_property
    def sets(self) -> list[HeadSet]:
        return [HeadSet(f"L{layer}", tuple((layer, head) for head in heads)) for layer, heads in self.selection.items()]

    @cached_property
    def task(self) -> tuple[Task, Measure]:
        return texts(self.model, self.texts), LOSS

    @property
    def intervention(self) -> Replacing:
        return Replacing("zero")

    def measure(self, facts: dict[str, Any], parts: Parts, advance: Advance) -> SilenceResult:
        effects = effects_by_set(self.passes, self.sets, parts, advance, HeadSet("intact copy", ()))
        effect_SN = np.stack([effects.by_set[heads.identity] for heads in self.sets], 1)
        facts |= {"intact": float(effects.intact_S.mean()), **effects.facts, **effects.unshared}
        return SilenceResult(tuple(heads.name for heads in self.sets), effect_SN, facts)
