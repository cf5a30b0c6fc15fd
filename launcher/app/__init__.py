"""What a verb does, for programs to call, too: prepare, start, follow and submit runs. No command line."""
