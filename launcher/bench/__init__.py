"""From measured collectives to bandwidths, tables and plots. Starts nothing."""
