"""The example distributions run their own tests, once installed (test_example_schedule.py)."""

collect_ignore = ["example_schedule"]
