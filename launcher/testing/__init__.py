"""Conformance suites that authors of plugins subclass."""
