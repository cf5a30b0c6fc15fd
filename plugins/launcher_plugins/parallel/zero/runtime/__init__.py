"""DeepSpeed on our ranks, groups and schedules."""
