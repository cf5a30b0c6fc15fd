"""Predictions: bytes, operations, messages and seconds of a layout. No rule that refuses one."""
