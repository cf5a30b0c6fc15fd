"""Training state on disk, by global position, for any layout."""
