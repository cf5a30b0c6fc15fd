"""From YAML and overrides to a typed configuration, each value with its origin. The only place with Hydra."""
