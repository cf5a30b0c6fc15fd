"""From a schedule's actions to validated action lists and their timeline. No torch."""
