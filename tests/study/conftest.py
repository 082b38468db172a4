"""What the tests of studies share."""

from dataclasses import replace
from typing import Any

import pytest

from attnscope.studies.atlas import Plan, plan


@pytest.fixture
def short_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command `scan` reads two trials and draws no probes: test_scan draws them."""

    def short(*given: Any, **how: Any) -> Plan:
        planned = plan(*given, **how)
        return replace(planned, trials=[one for one in planned.trials if one.name in ("offsets", "sink")])

    monkeypatch.setattr("attnscope.api.scan.plan", short)
    monkeypatch.setattr("attnscope.api.scan.save_probes", lambda *given: None)
