"""Conformance suites for plugin authors."""
