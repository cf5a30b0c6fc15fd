"""Makes token files of text, looks at those that are there, and shows what is in them; without torch."""
