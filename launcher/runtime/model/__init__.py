"""The layers of models, and how they are built, split, recomputed and compiled. No communication here."""
