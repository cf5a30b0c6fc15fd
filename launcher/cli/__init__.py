"""The command line: arguments, the terminal and one file per verb. What a verb does is in `launcher.app`."""
