"""Strategies of DeepSpeed: ZeRO, offload, tensor, pipeline and sequence parallelism. Only this room imports it."""
