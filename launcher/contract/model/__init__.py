"""A model as values: its layers; of a GPT or Llama also its sizes, and how Hugging Face's files hold it."""
