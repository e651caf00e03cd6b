"""What a rank of a suite does once for all its forked cells."""

import cpuinfo

from dsgpt.benchmarks.worker import identify_cpu_once


def test_the_cpu_is_identified_once_for_all_cells(monkeypatch):
    """The real function sleeps for a second in every call."""
    calls = []
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: calls.append("called") or {"vendor_id_raw": "AuthenticAMD"})
    identify_cpu_once()
    assert [cpuinfo.get_cpu_info()["vendor_id_raw"] for _ in range(2)] == ["AuthenticAMD"] * 2
    assert calls == ["called"]
