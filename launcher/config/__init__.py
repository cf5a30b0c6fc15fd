"""From YAML and overrides to typed settings, each with its source, checked by `rules`. Alone has Hydra."""
