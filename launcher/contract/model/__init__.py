"""A GPT or Llama model: its sizes, and how files in Hugging Face's format hold it."""
