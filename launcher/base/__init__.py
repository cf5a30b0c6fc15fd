"""What knows nothing of training: errors, units, text, files, plugins by name. Imports nothing of ours."""
