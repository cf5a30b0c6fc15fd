"""DeepSpeed's ZeRO on the launcher's ranks, groups and schedules."""
