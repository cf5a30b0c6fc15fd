"""Tools that know nothing of training: errors, units, text, files, plugins. Imports no other package."""
