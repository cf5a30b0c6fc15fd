"""A rank as a process: start, groups, heartbeat, end."""
