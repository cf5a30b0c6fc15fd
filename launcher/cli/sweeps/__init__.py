"""The verb `sweep`, a file per action."""
