"""Replicas with samples of their own."""
