"""What a run watches, what it does about it, and how it is written down."""
