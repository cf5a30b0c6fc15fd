"""From the actions of a schedule to checked action lists and their timeline. No plan, no torch."""
