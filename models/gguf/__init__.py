"""GGUF files: one file that holds configuration, tokenizer, chat template and weights."""
