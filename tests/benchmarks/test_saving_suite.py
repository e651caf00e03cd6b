"""``python src/benchmark.py saving``: saves by number of writers."""

import io
import time

import pytest

from dsgpt.benchmarks.saving import BLOCK, MB_PER_SEC, SlowFile, write_together


def test_all_files_of_a_process_share_its_bandwidth():
    files = [SlowFile(io.BytesIO()) for _ in range(2)]
    data = bytes(range(256)) * (BLOCK // 256) + b"end"
    began = time.perf_counter()
    for file in (*files, files[0]):
        file.write(data)
    assert time.perf_counter() - began >= 2 * len(data) / (MB_PER_SEC * 1e6)  # the last block goes at once
    assert [file.getvalue() for file in files] == [data * 2, data]


@pytest.mark.long
def test_two_processes_write_a_state_in_half_of_the_time(tmp_path):
    alone, together = (write_together(tmp_path / str(writers), writers, preset="tiny") for writers in (1, 2))
    size = 3 * 4 * 13_405_248
    assert size / (MB_PER_SEC * 1e6) < alone
    assert together < 0.7 * alone
    written = sum(path.stat().st_size for path in (tmp_path / "2").glob("*.safetensors"))
    assert size < written < 1.01 * size
