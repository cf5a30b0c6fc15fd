"""The command line: arguments, the terminal and its verbs. What a verb does is in `launcher.app`."""
