"""Models of the Hugging Face hub: their names, their files, and those in huggingface_hub's cache."""
