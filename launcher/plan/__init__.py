"""The plan: what every rank does, and what that is predicted to cost."""
