"""Replicas that average their weights with two neighbours."""
