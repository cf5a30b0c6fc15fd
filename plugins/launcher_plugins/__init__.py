"""Everything that is a strategy, behind the entry points that third parties use, too."""
