"""Models in and out: Hugging Face folders, GGUF files, their tokenizers."""
