"""From YAML and overrides to a typed configuration, each value with its source. The only place with Hydra."""
