"""ZeRO through DeepSpeed."""
