"""The command line. A verb is a function here and an entry in `verbs`; what it does is in `launcher.app`."""
