"""Output of Nsight Compute is parsed, assigned to the right candidate, and used in correlations; a stand-in replaces ncu."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LONG = """==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "contraction_6733c8b34a66" - 1: 0%....50%....100% - 8 passes
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","python3.12","127.0.0.1","void implicit_convolve_sgemm<float, float, 128, (int)5>(int, const float *)","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","40,320"
"0","4711","python3.12","127.0.0.1","void implicit_convolve_sgemm<float, float, 128, (int)5>(int, const float *)","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","Command line profiler metrics","l1tex__data_pipe_lsu_wavefronts_mem_shared.sum","","1,000,000"
"1","4711","python3.12","127.0.0.1","contraction_6733c8b34a66","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","10,080"
"1","4711","python3.12","127.0.0.1","contraction_6733c8b34a66","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","Command line profiler metrics","l1tex__data_pipe_lsu_wavefronts_mem_shared.sum","","400,000"
"1","4711","python3.12","127.0.0.1","contraction_6733c8b34a66","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","Command line profiler metrics","sm__warps_active.avg.pct_of_peak_sustained_active","%","25.0"
"1","4711","python3.12","127.0.0.1","contraction_6733c8b34a66","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes_read.sum","byte","n/a"
"2","4711","python3.12","127.0.0.1","window_0123456789ab","1","7","(64, 1, 1)","(12, 1, 1)","0","9.0","Command line profiler metrics","gpu__time_duration.sum","ns","2,520"
"2","4711","python3.12","127.0.0.1","window_0123456789ab","1","7","(64, 1, 1)","(12, 1, 1)","0","9.0","Command line profiler metrics","l1tex__data_pipe_lsu_wavefronts_mem_shared.sum","","0"
"2","4711","python3.12","127.0.0.1","window_0123456789ab","1","7","(64, 1, 1)","(12, 1, 1)","0","9.0","Command line profiler metrics","sm__warps_active.avg.pct_of_peak_sustained_active","%","5.0"
"""
RAW = """==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","gpu__time_duration.sum","lts__t_sectors_op_read.sum"
"","","","","","","","","","","","usecond","sector"
"0","4711","python3.12","127.0.0.1","contraction_6733c8b34a66","1","7","(128, 1, 1)","(98, 1, 1)","0","9.0","10.08","12,345"
"""
TIME, SHARED = "gpu__time_duration.sum", "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
ORDER: list[dict[str, Any]] = [
    {"layer": "R2", "candidate": None, "kernels": []},
    {"layer": "R2", "candidate": 0, "kernels": ["contraction_6733c8b34a66", "window_0123456789ab"]},
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    return importlib.import_module("ncu_transactions")


def test_both_forms_of_csv(script: ModuleType) -> None:
    library, first, second = script.parse(LONG)
    assert library.kernel.startswith("void implicit_convolve_sgemm")
    assert (first.kernel, second.kernel) == ("contraction_6733c8b34a66", "window_0123456789ab")
    assert first.values == {TIME: pytest.approx(10.08e-6), SHARED: 400_000, OCCUPANCY: 25.0}
    (raw,) = script.parse(RAW)
    assert raw.values == {TIME: pytest.approx(10.08e-6), "lts__t_sectors_op_read.sum": 12345}
    with pytest.raises(ValueError, match="no CSV header"):
        script.parse("==ERROR== no kernels were profiled\n")


def test_kernels_go_to_their_candidates(script: ModuleType) -> None:
    launches = script.parse(LONG)
    (_, library), (_, ours) = script.assign(ORDER, launches)
    assert library == {TIME: pytest.approx(40.32e-6), SHARED: 1_000_000}
    assert ours[TIME] == pytest.approx(12.6e-6) and ours[SHARED] == 400_000
    assert ours[OCCUPANCY] == pytest.approx((25 * 10.08 + 5 * 2.52) / 12.6)
    with pytest.raises(ValueError, match="ncu saw"):
        script.assign([ORDER[0], {**ORDER[1], "kernels": ["contraction_6733c8b34a66", "another"]}], launches)
    with pytest.raises(ValueError, match="1 launches more"):
        script.assign([ORDER[0], {**ORDER[1], "kernels": ["contraction_6733c8b34a66"]}], launches)


def stand_in(folder: Path, body: str) -> str:
    """An executable that stands in for ncu: `log` is its output file, `metrics` the requested metrics, `launched` the child's output file."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
        "if '--version' in sys.argv: print('Version 2025.3.0'); sys.exit()\n"
        "log, metrics, launched = (sys.argv[sys.argv.index(name) + 1] for name in ('--log-file', '--metrics', '--launched'))\n" + body
    )
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parameters = {"block_m": 64, "block_n": 64, "block_k": 16, "thread_m": 4, "thread_n": 4, "split": 2, "stages": 2, "cluster": 0}
    candidates = [{"schedule": "contraction", "parameters": parameters}]
    (tmp_path / "manifest.json").write_text(json.dumps({"target": "h200", "layers": [{"layer": "R2", "candidates": candidates}]}))
    return tmp_path


def test_profiling_leaves_out_what_ncu_does_not_know(script: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu = stand_in(
        folder,
        "if 'ldgsts' in metrics:\n"
        "    Path(log).write_text('==ERROR== Failed to find metric l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum\\n'); sys.exit(1)\n"
        f"Path(log).write_text({LONG!r})\nPath(launched).write_text({json.dumps(ORDER)!r})\n",
    )
    script.profile(folder, ncu, ["R2"], 5)
    said = capsys.readouterr().out
    assert "not known to this ncu: l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum" in said and "3 launches, without" in said
    script.profile(folder, ncu, ["R2"], 5)
    assert "there already" in capsys.readouterr().out

    script.report(folder, "")
    said = capsys.readouterr().out
    assert "0.31" in said and "0.40" in said and "dram__bytes_read.sum" in said.partition("missing:")[2]


def test_counters_that_cannot_be_read(script: ModuleType, folder: Path) -> None:
    ncu = stand_in(folder, "Path(log).write_text('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\\n'); sys.exit(1)\n")
    with pytest.raises(SystemExit, match="administrators"):
        script.profile(folder, ncu, ["R2"], 5)
    ncu = stand_in(folder, "print('no device'); sys.exit(9)\n")
    with pytest.raises(SystemExit, match="status 9"):
        script.profile(folder, ncu, ["R2"], 5)
    with pytest.raises(SystemExit, match="ncu is not here"):
        script.find_ncu(str(folder / "nothing"))


def test_predicted_counts(script: ModuleType) -> None:
    parameters = {"block_m": 64, "block_n": 64, "block_k": 16, "thread_m": 4, "thread_n": 4, "split": 1, "stages": 2, "cluster": 0}
    found = script.predicted("R2", parameters, "h200")
    # 49 blocks of 36 steps; a step loads two tiles of 64 x 16 elements
    assert found["predicted sectors"] == pytest.approx(49 * (36 * 2 * 64 * 16 / 8 + 64 * 64 / 8))
    assert found["predicted shared wavefronts"] > 0 and 0 < found["predicted occupancy"] <= 100
    assert script.predicted("R2", {"nonsense": 1}, "h200") == {}
    rows = [{"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 2.0}, {"a": 9.0, "b": 3.0}, {"a": 1.0}]
    assert script.agreement(rows, "a", "b") == {"correlation": pytest.approx(0.9707, abs=1e-3), "median ratio": 2.0}
    assert script.agreement(rows, "a", "c") == {"correlation": None, "median ratio": None}
