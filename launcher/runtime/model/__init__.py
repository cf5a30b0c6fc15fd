"""The layers of models, and what runs or cuts them. No communication but through a wire that is given."""
