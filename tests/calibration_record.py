"""The record of a calibration of two devices, with made-up rates."""

BUS = {"all_reduce": {"fp32": 1e9, "bf16": 5e8}, "all_gather": {"fp32": 4e9}}
RECORD = {
    "schema_version": "2.0",
    "timestamp_utc": "2026-11-22T18:00:00+00:00",
    "machine": "Some Processor, 2 devices of 1 core",
    "hardware": {"device": "cpu"},
    "env": {},
    "threads_per_device": 1,
    "memory_bytes_per_device": 8_000_000_000,
    "host_bytes_per_device": 8_000_000_000,
    "seconds": 60.0,
    "disk_bytes_per_sec": 1e9,
    "ceilings": [
        {
            "devices": devices,
            "matrix_flops_per_sec": {"fp32": {"128": {"256": 1e11}, "768": {"256": 2e11 / devices, "1024": 4e11}}},
            "attention_flops_per_sec": {"fp32": {"64": {"128": 1e10, "512": 2e10}}},
            "elementwise_bytes_per_sec": {"fp32": 5e9},
            "logits_per_sec": {"fp32": 1e9},
            "triad_bytes_per_sec": 1e10,
            "operation_sec": 1e-6,
            "bus_bytes_per_sec": None if devices == 1 else BUS,
            "all_reduce_sec": None if devices == 1 else 1e-4,
            "host_link_bytes_per_sec": 5e9,
        }
        for devices in (1, 2)
    ],
}
