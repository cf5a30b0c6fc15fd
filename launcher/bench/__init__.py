"""From measured collectives to bandwidths, tables and pictures. Reads what ranks measured; starts nothing."""
