"""The example distributions run their own tests, once installed (test_example_*.py)."""

collect_ignore = ["example_parallel", "example_schedule"]
