"""A rank as a process: start, groups, heartbeat, stop."""
