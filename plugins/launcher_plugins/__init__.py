"""Everything that is a strategy, each with an entry point in pyproject.toml, as third parties have them."""
