"""What cannot be trained. A check yields its fault with its fix and its `ways`, which `search` only tries."""
