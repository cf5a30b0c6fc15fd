"""What is trained on, as far as files tell it: sources, tokenizers, tokens that were made of them, blends."""
