"""The command line: one module per verb, each with `HELP` and `run(words) -> exit code`."""
