"""From YAML and overrides to one typed, checked configuration."""
