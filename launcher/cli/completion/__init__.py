"""Shell completion: what may stand at the cursor, by standard library alone; and a script for each shell."""
