"""What every study has from its base, on one of a few lines: layers whose heads give nothing."""

import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnscope.errors import UsageError
from attnscope.interventions.base import LOSS, Replacing
from attnscope.interventions.passes import measured
from attnscope.interventions.spec import HeadSet
from attnscope.studies.ablation import texts
from attnscope.studies.study import SetStudy, effects_by_set
from attnscope.studies.study_folder import StudyRecord
from attnscope.utils.tables import as_table

TEXTS = ["the bank of the river, the bank of the", "the cat saw the dog"]


@dataclass(frozen=True)
class Plan:
    select: dict | None = None
    name: str = "all heads"


@dataclass(frozen=True, repr=False)
class Silenced(StudyRecord):
    stem = "silence"

    names: tuple
    effect_SN: np.ndarray
    facts: dict

    @property
    def line(self) -> str:
        return f"{len(self.names)} layers, in {self.unit}"

    def table(self) -> pa.Table:
        return as_table({"set": list(self.names), "effect": self.effect_SN.mean(0)})


@dataclass(frozen=True)
class SilenceStudy(SetStudy[Silenced]):
    kind, readings, schema, stage = "silence", "silenced", "silence/1", "silencing"

    model: object
    texts: tuple = tuple(TEXTS)
    plan: Plan = Plan()

    @cached_property
    def sets(self):
        return [HeadSet(f"L{layer}", tuple((layer, h) for h in heads)) for layer, heads in self.selection.items()]

    @cached_property
    def task(self):
        return texts(self.model, self.texts), LOSS

    @property
    def intervention(self):
        return Replacing("zero")

    def measure(self, facts, parts, advance):
        run = effects_by_set(self.passes, self.sets, parts, advance, HeadSet("intact copy", ()))
        effect_SN = np.stack([run.by_set[one.identity] for one in self.sets], 1)
        return Silenced(tuple(one.name for one in self.sets), effect_SN, facts | run.facts | run.unshared)


def test_a_study_measures_what_its_passes_do_alone(demo):
    study, steps = SilenceStudy(demo), []
    record = study.run(advance=steps.append)
    loss_SK = measured(demo, texts(demo, TEXTS), study.sets, "zero")
    assert record.effect_SN == pytest.approx(loss_SK[:, 1:] - loss_SK[:, :1], abs=1e-5)
    assert repr(record) == "Silenced: 4 layers, in nats per token"
    assert sum(steps) == study.cost().steps


def test_a_study_says_its_cost_before_it_runs(demo):
    cost = SilenceStudy(demo, plan=Plan({1: (0, 1), 2: (0,)}, "some")).cost()
    tokens = sum(map(len, texts(demo, TEXTS).ids))
    assert cost.line.startswith("2 sets of heads, on 2 texts: at most ")
    assert cost.steps >= tokens * 4 * 3
    assert 0 < cost.seconds() < 600


def test_a_folder_of_a_study_has_its_table_and_facts_and_resumes(demo, tmp_path, monkeypatch):
    record = SilenceStudy(demo).run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"silence.json", "silence.parquet", "silenced"}
    facts = json.loads((tmp_path / "silence.json").read_text())
    assert (next(iter(facts)), facts["schema"], list(facts)[-1]) == ("schema", "silence/1", "versions")
    assert (facts["select"], facts["task"]["sequences"], facts["spread"]) == ("all heads", 2, None)
    assert pq.read_table(tmp_path / "silence.parquet")["set"].to_pylist() == ["L0", "L1", "L2", "L3"]
    monkeypatch.setattr("attnscope.interventions.passes.Passes.run", lambda *given: pytest.fail("it was read already"))
    np.testing.assert_array_equal(SilenceStudy(demo).run(tmp_path).effect_SN, record.effect_SN)


def test_a_folder_of_another_study_is_refused(demo, tmp_path):
    SilenceStudy(demo).run(tmp_path)
    other = SilenceStudy(demo, tuple(TEXTS[:1]))
    with pytest.raises(UsageError, match="holds another silence"):
        other.run(tmp_path)
    assert other.run(tmp_path, force=True).facts["task"]["sequences"] == 1
    with pytest.raises(UsageError, match="holds another silence"):
        SilenceStudy(demo).claim(tmp_path)
